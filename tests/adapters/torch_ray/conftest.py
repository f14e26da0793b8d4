"""A Ray cluster of raylets on this machine."""

from raylets import nodes as nodes
from raylets import until as until
