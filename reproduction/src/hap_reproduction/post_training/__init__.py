"""What pruned networks are worth before any training: ResNet56 on CIFAR-10, and ResNet50 with ImageNet weights.

`cifar10.py` measures by criterion, budget and repair, and `networks.py` has its dense networks: `python -m
hap_reproduction.post_training.cifar10`. `imagenet.py` measures beside Torch-Pruning (`torch_pruning.py`), on the images
of `imagenet_images.py`. Nothing here is imported from elsewhere. Start reading at `cifar10.py`.
"""
