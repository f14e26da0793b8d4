"""Stands in for flash_attn.utils."""
