"""Stands in for flash-attn, which needs CUDA to build: its names are imported and never called."""
