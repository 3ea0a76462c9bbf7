"""What changes the record: queue, leases, calls, rewards, pruning."""
