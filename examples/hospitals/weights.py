"""python weights.py FOLDER: the measurements that the model of a run uses, heaviest first."""

import sys

from hospitals_app.task import NAMES, model

from fedda.deploy import trained

weights = trained(sys.argv[1], model()).weight[0].tolist()
for weight, name in sorted(zip(weights, NAMES, strict=True), key=lambda pair: -abs(pair[0])):
    if weight:
        print(f"{weight:+.3f}  {name}")
