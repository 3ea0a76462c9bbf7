"""Pure functions from episodes to numbers, no I/O.

`signals` finds automatic rewards, `credit` turns the rewards of an episode into a value for each call, `advantage`
turns the values of an update's calls into advantages, `loss` computes a loss for each token, `correction` weighs tokens
that another policy sampled, `aggregation` combines the losses of all tokens. Each algorithm is one file, found by its
name (`registry`); a user's function takes the same arguments.
"""
