"""Saves below the folder of the first argument, which may not be written, as the second says; prints the errno."""

from __future__ import annotations

import sys

import victims

import jaxckpt

try:
    victims.save_where_refused(print, sys.argv[1] + "/ckpt", sys.argv[2], None)
except jaxckpt.StorageError as error:
    print(error.errno)
