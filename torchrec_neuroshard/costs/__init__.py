"""Cost models of fused groups and collectives, and the simulator that prices whole plans with them."""
