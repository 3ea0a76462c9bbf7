"""From episodes to numbers: pure functions, no I/O.

`credit` turns the rewards of an episode into a value for each call, `advantage` the values of an update's calls into
advantages, `loss` logprobs and advantages into a loss for each token, `correction` makes up for tokens that another
policy drew, `aggregation` makes the losses of all tokens one. Each idea is one file, found by its name; a user's own
takes the same. `terms` are the numbers that they can be told.
"""
