"""Provides the episodes of a step: reads tasks, collects rollouts, adds automatic rewards, and evaluates."""
