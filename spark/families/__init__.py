"""What spark is taught, one file a family: problems, the real tools that solve them, and teachers who err.

A family is a module with `problem(rng, split)`, `tool(problem)`, `teach(problem, rng, offer, style)` and
`check(problem, text)`. The same seed gives the same problems for ever.
"""
