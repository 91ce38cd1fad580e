"""Ranks on several nodes: the rendezvous, the authenticated connection of two nodes, and the ranks of another node."""
