"""The page of CIFAR-10 results, made from result files and from nothing else.

`rows` brings jobs and their results together, `verdicts` judges differences, `claims` says what holds, `results` puts
the page together, `charts` draws, and `markdown` writes tables. Start with `results`.
"""
