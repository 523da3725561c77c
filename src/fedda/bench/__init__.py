"""The cost of a round on this machine, and how it grows. `fedda bench` prints it."""
