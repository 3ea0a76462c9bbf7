"""Rollouts of a step or an evaluation."""
