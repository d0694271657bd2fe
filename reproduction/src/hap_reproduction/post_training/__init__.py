"""What pruned networks are worth before any training: ResNet56 on CIFAR-10, by criterion, budget and repair.

`networks.py` has the dense networks, `cifar10.py` the experiment: `python -m hap_reproduction.post_training.cifar10`.
Nothing here is imported from elsewhere. Start reading at `cifar10.py`.
"""
