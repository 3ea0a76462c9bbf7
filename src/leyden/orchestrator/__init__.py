"""The half of training that decides what to learn from: tasks, rollouts, credit, evaluation, reports."""
