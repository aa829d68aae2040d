"""The mixtures of sigmoids that stand for gelu, fitted minimax: numbers, and what they mean.

A term (w, b, c) with c > 0 is a pair of heads, w σ(b q + c) and w σ(b q - c); a term with c = 0 is
one head, w σ(b q). So p(q) = Σ w σ is odd around one half, p(-q) = 1 - p(q), as the gate that it
stands for is, and its error q p(q) - α(q) is even.

The terms minimise the largest error over the real line, under Σ|w| < 2 (`analyses/fit_gates.py`).
Then each w was rounded to a multiple of 2^-23, so that float32 holds every w and every partial sum
of them: they add up to exactly 1, and for large q the activation is q to the last bit. b and c were
fitted again around the rounded w, and rounded to ten decimals; the two roundings cost less than
0.1 % of the error.

`bound` is the certificate of `certificate.py`, rounded up to four digits: no real q has a larger
error. "gelu_tanh" is certified for both values of sqrt(2/π) in use: gelu_fast rounds it to ten
digits, which moves the activation by less than 1e-11 and no digit of the bound.
"""

from typing import NamedTuple

__all__ = ["MIXTURES", "Mixture", "Term"]


class Term(NamedTuple):
    """One head of weight w (c = 0), or a mirrored pair of heads of weight w each (c > 0)."""

    w: float
    b: float
    c: float


class Mixture(NamedTuple):
    """Terms, and a certified upper bound of their largest error over the real line."""

    bound: float
    terms: tuple[Term, ...]


MIXTURES: dict[str, dict[int, Mixture]] = {
    "gelu": {
        1: Mixture(0.01396, (Term(1.0, 1.7729338588, 0.0),)),
        2: Mixture(0.004219, (Term(0.5, 2.2116605837, 1.3099193429),)),
        4: Mixture(
            2.422e-05,
            (
                Term(-0.08182358741760254, 1.5236705302, 2.9037752117),
                Term(1.3823645114898682, 1.505650297, 0.0),
                Term(-0.21871733665466309, 2.0013470546, 0.0),
            ),
        ),
        6: Mixture(
            1.004e-06,
            (
                Term(0.0034639835357666016, 1.384978066, 4.3920484923),
                Term(-0.21177315711975098, 1.3141961089, 2.0937182628),
                Term(1.4880719184875488, 1.3058988566, 0.0),
                Term(-0.07145357131958008, 1.8272516834, 0.0),
            ),
        ),
        8: Mixture(
            5.863e-08,
            (
                Term(0.002740025520324707, 1.3737472124, 4.3783141307),
                Term(0.0040433406829833984, 1.9603275241, 3.6299944643),
                Term(-0.16949379444122314, 1.3815102226, 2.2813993359),
                Term(0.662710428237915, 1.3818037812, 0.4246753586),
            ),
        ),
    },
    "gelu_tanh": {
        1: Mixture(0.01426, (Term(1.0, 1.7744975536, 0.0),)),
        2: Mixture(0.004528, (Term(0.5, 2.2211830669, 1.3254551866),)),
        4: Mixture(
            3.708e-05,
            (
                Term(-0.06568253040313721, 1.5658968071, 3.1530598217),
                Term(1.3159197568893433, 1.5326498465, 0.0),
                Term(-0.18455469608306885, 2.1169244947, 0.0),
            ),
        ),
        6: Mixture(
            4.558e-06,
            (
                Term(0.01244819164276123, 1.2264934917, 3.6168251084),
                Term(-0.12324297428131104, 1.3160473485, 2.3366330986),
                Term(0.6107947826385498, 1.4846775561, 0.5192658752),
            ),
        ),
        8: Mixture(
            4.097e-08,
            (
                Term(0.0023255348205566406, 1.5074206489, 5.0339554016),
                Term(-0.030661463737487793, 1.4484431555, 3.0924400027),
                Term(-0.1779782772064209, 1.3324076084, 1.8972145435),
                Term(0.706314206123352, 1.3437770919, 0.3966698258),
            ),
        ),
    },
}
"""By activation ("gelu_tanh" is gelu_new, gelu_fast and gelu_pytorch_tanh), then heads a neuron."""
