"""The training loop: requests groups of rollouts, computes gradients, publishes weights, saves checkpoints.

It talks to the server over HTTP and does not depend on the algorithm: samples carry an advantage and a weight.
"""
