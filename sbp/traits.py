"""Traits of ops: facts that no rule says, by rows of ops. Every list of ops of some kind is read off here; so is how
often an op evaluates exponentials and the like.

Traits of what a result is of its input:

same          its values in their places, perhaps in another dtype or memory
reshaped      its values in their order in another shape; `regrouped` where any shape may be asked for
permuted      its dims in another order
cut           a range of one dim; `pieces` where the ranges make all of it
spread        its values repeated along new places
like, new     of its shape, or of another that is asked for: it is not read
even          the same at every place of a dim of any length

Others:

linear        the backward looks at none of the inputs' values
random        draws numbers, whose gradient is zero; `unread` where an input says no more than shape, dtype and device;
              `follows` where the result may lie as the input does
shifts        moves means and sums by a number
promotes      takes inputs of several dtypes as of the widest, as pointwise ops do
idle          may have nothing to do for a single sample
small         takes next to no time beside a product of matrices, though torch's tags do not say so
empty         leaves its values open
filled        one value everywhere, as many times as its argument `size` says: ranks may make their pieces alone
kept          is never taken apart: on fakes it may become another kernel than on the device
addends       is taken apart always, into sums that may be partial
along         has a formula for a dim that is split
drops         zeroes elements by chance
unfaked       takes dtypes that torch's check of tensors without values refuses
"""

from functools import cache

__all__ = ["evaluations", "named", "traits"]

# A star stands for all overloads that are in no row by themselves.
ROWS = """
    same                    alias* lift_fresh* positive* type_as* detach* to* _to_copy*
    same idle               contiguous* clone*
    reshaped regrouped idle view* reshape* _unsafe_view*
    reshaped regrouped      flatten.using_ints unflatten.int
    reshaped                view.dtype flatten* unflatten* _reshape_alias* reshape_as* view_as* ravel*
    reshaped                squeeze* unsqueeze* atleast_1d* atleast_2d* atleast_3d*
    permuted                t* transpose* swapaxes* swapdims* permute* movedim* moveaxis* numpy_T* matrix_H* mT* mH*
    permuted                adjoint*
    cut pieces              split* split_with_sizes* chunk* tensor_split.sections
    cut                     slice* narrow* tensor_split* unsafe_split* unsafe_chunk* hsplit* vsplit* dsplit*
    spread idle             expand*
    spread                  expand_as* broadcast_to*

    like                    zeros_like* ones_like* full_like*
    like empty              empty_like*
    new filled              new_zeros* new_ones* new_full*
    new empty filled        new_empty*
    new empty               new_empty_strided*
    even                    repeat* tile* scalar_tensor*
    even filled             zeros* ones* full*
    even small              repeat_interleave*
    even empty filled       empty*
    empty                   empty_strided*

    linear                  neg* sum* mean* embedding* select* unbind*
    linear shifts           add* sub* rsub*
    linear promotes small   cat* stack*
    small                   constant_pad_nd* gather* select_scatter* slice_scatter* tril* triu*

    random                  normal* binomial* poisson*
    random small            bernoulli*
    random unread           uniform* exponential* log_normal* cauchy* geometric* normal_functional* random*
    random unread follows   rand_like randn_like randint_like randint_like.low_dtype bernoulli.p
    random unread follows   sbpflow::normal_apart sbpflow::kept_on_card

    kept                    scaled_dot_product_attention*
    addends                 cross_entropy_loss* nll_loss* nll_loss_nd* nll_loss2d*
    along                   softmax.int log_softmax.int logsumexp _softmax _log_softmax
    along                   var.correction std.correction group_norm
    drops                   dropout* alpha_dropout* feature_dropout* feature_alpha_dropout*
    unfaked                 _grouped_mm*
"""

# Exponentials and the like that are evaluated for each element, in the forward and in the backward: they may take
# longer than it takes to read and write. Backwards that are products with the result, such as those of exp, tanh and
# softmax, evaluate none. Backwards that somebody calls by name are forwards.
FUNCTIONS = """
    1 0     exp* exp2* expm1* log* log1p* log2* log10* tan* tanh* sigmoid* softmax.int _softmax asin* acos* atan*
    1 0     silu_backward* softplus_backward* elu_backward* _log_softmax_backward_data* glu_backward*
    1 1     sin* cos* sinh* cosh* erf* erfc* silu* elu* selu* celu* glu* log_softmax.int _log_softmax logsumexp
    1 1     cross_entropy_loss*
    1 2     gelu*
    2 0     gelu_backward* binary_cross_entropy* log_sigmoid*
    2 1     softplus* binary_cross_entropy_with_logits*
    2 2     logaddexp* logaddexp2*
    3 4     mish*
    4 0     mish_backward*
"""

# What computes for as long as so many functions do, as timed on a CPU: sums of norms, of which an RMS norm is many
# kernels there. A GELU by tanh is another kernel than that by erf: `/` stands before what is asked for.
AS_LONG = """
    1 0     layer_norm* native_layer_norm*
    1 1     group_norm* native_group_norm*
    6 1     batch_norm*
    3 15    rms_norm* _fused_rms_norm*
    6 6     gelu/tanh
"""

VIEWS = frozenset({"same", "reshaped", "permuted", "cut", "spread"})  # traits of what shows its input otherwise


def _read(text: str, width: int) -> dict[str, list[str]]:
    """The first columns of each op's row, by its name."""
    rows: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        for name in line[width:].split():
            if name in rows:
                raise ValueError(f"{name} has a row already")
            rows[name] = line[:width].split()
    return rows


_rows = {name: frozenset(said) for name, said in _read(ROWS, 24).items()}
_functions, _as_long = (
    {name: (int(forward), int(back)) for name, (forward, back) in _read(text, 8).items()}
    for text in (FUNCTIONS, AS_LONG)
)
NONE: frozenset[str] = frozenset()


@cache
def traits(name: str) -> frozenset[str]:
    """The traits of an op as rules name it; without an overload, those that all of its have.

    >>> sorted(traits("split.Tensor")), sorted(traits("view.dtype")), sorted(traits("mm"))
    (['cut', 'pieces'], ['reshaped'], [])
    """
    return _rows.get(name) or _rows.get(name.partition(".")[0] + "*", NONE)


@cache
def evaluations(name: str) -> tuple[int, int]:
    """Exponentials and the like that an op evaluates for each element, in the forward and in the backward, or for as
    many of which it computes.

    >>> evaluations("gelu"), evaluations("gelu/tanh"), evaluations("mul.Tensor")
    ((1, 2), (6, 6), (0, 0))
    """
    star = name.partition(".")[0] + "*"
    return next((of[each] for each in (name, star) for of in (_functions, _as_long) if each in of), (0, 0))


def named(trait: str) -> tuple[str, ...]:
    """The ops that have a trait, in the order of the rows."""
    return tuple(name.removesuffix("*") for name, said in _rows.items() if trait in said)
