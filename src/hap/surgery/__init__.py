"""surgery"""
