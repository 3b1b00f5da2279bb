"""What everything rests on: errors, options, progress, threads, the processes of a job."""
