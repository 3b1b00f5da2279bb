"""What is in the directory of a run: names of steps, the paths run@40 and run@best, pins and leases."""
