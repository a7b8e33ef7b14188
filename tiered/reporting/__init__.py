"""The report of a training as one page: what is recorded while it runs, and the file that shows it."""
