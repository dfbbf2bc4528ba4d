"""Training: responses of the target, anchors and labels, the Domino objective, the loop."""
