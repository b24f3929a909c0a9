"""Benchmarks of donorloader: a script behind every speed the project claims."""
