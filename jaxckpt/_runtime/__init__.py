"""The foundation of all other folders: errors, options, progress, threads, the processes of a job."""
