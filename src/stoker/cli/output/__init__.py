"""The output of commands: progress, tables, and reports of builds and deployments."""
