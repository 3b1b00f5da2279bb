"""The processes of a job: rendezvous over JAX's coordination service, collective calls, and failures of processes."""
