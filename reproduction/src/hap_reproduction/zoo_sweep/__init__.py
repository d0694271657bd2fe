"""zoo_sweep"""
