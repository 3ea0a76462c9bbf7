"""Runs agents and knows nothing of training.

A *worker* holds a key of the server: it leases rollouts, keeps them alive, scores them and reports how they ended.
Agent code runs in *host* processes, many attempts in each; a host has a key that calls models for its own attempts and
does nothing else. A resource that is costly to start is a *service*; attempts acquire services from a pool. Workers and
hosts reach the server over HTTP only, and none of this needs torch.
"""
