"""What commands print: progress, tables, and reports of builds and deployments."""
