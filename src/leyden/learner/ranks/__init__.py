"""The learner on several devices: one process a device (a rank), with the policy sharded over them by torch's FSDP2."""
