"""Rollout: serving engines, their replicas, and the client that agent loops talk to."""
