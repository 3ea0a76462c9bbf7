"""The half of training that computes with torch: policy, objective, gradient, checkpoint."""
