"""Metrics of a user, for tests: of logits [n, L] and labels [n], both tensors in main memory."""


def top2(logits, labels):
    """Return the share of samples whose label is among the two largest logits."""
    return (logits.topk(2).indices == labels[:, None]).any(1).float().mean()


def recalled(logits, labels):
    """Return the balanced accuracy: the mean over the labels that occur of their recall."""
    hits = logits.argmax(1) == labels
    return float(sum(hits[labels == c].float().mean() for c in labels.unique()) / len(labels.unique()))


def hits(logits, labels):
    """Return the accuracy, as mpifl counts it."""
    return int((logits.argmax(1) == labels).sum()) / len(labels)


def words(logits, labels):
    """Return what is no number."""
    return "many"


def broken(logits, labels):
    """Raise."""
    raise ZeroDivisionError("of mine")


def accuracy_of_mine(logits, labels):
    """Have a name like a column's."""
    return 0.0


def train_loss(logits, labels):
    """Have a name whose columns are free."""
    return 1.0


def top2_again(logits, labels):
    """Have a name that begins like another's."""
    return 0.0


class Kind:
    """Is no function."""


def error_rate(logits, labels):
    """Return the share of wrong labels: less is better."""
    return 1 - hits(logits, labels)


error_rate.better = -1


def sideways(logits, labels):
    """Have a direction that there is not."""
    return 0.0


sideways.better = "up"
