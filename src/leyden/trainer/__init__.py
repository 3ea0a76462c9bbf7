"""The loop: ask for groups of rollouts, turn what happened into a gradient, publish the weights, and lose nothing.

It talks to the server over HTTP like everybody else, and is blind to algorithms: rows carry an advantage and a weight.
"""
