"""From episodes to numbers: pure functions, no I/O.

`credit` turns the rewards of an episode into a value for each call, `advantage` the values of a group into advantages,
`loss` logprobs and advantages into a loss for each token, `aggregation` the losses of all tokens into one. Each idea
is one file, found by its name; a user's own is named `module:function`.
"""
