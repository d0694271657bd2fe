"""hap_reproduction"""
