"""Weights in memory: from the trainer's processes to the rollout replicas, with a receipt."""
