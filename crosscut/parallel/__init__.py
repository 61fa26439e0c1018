"""The engine: what a plan says, executed. Each parallelism is a file or folder of its own."""
