"""Plugins: each turns adaptation on in an existing job."""
