"""Saving: request, description, plan, claim, staging, writing, publication."""
