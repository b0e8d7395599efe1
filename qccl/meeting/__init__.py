"""Lets processes find each other, prove who they are, and agree who is in the group."""
