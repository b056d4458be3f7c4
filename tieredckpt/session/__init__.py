"""One job in this process: agent connection, incarnation, slots, save plans, rendezvous of agents."""
