"""Membership of a job: its nodes, their failure domains, and which of them are alive."""
