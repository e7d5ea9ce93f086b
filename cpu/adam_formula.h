/* The Adam formula, once, for every instruction set: Kingma & Ba, "Adam", arXiv 1412.6980, Algorithm 1; AMSGrad: Reddi
 * et al., arXiv 1904.09237; decoupled decay: Loshchilov & Hutter, arXiv 1711.05101; the order of operations is that of
 * torch.optim's fused CPU kernel. The same function stands in tests/support/formula.py.
 *
 * Every vec_* operation rounds once; vec_fma(a, b, c) is a * b + c rounded once. Compile with -ffp-contract=off. */

typedef struct {
    real s, decay, wd, w, b2, c2, nss, bc2s, eps;
    real inverse;  /* of bc2s */
    uint32_t turn; /* of compact.h */
    int flags;
} adam_scalars;

/* A square root over bc2s, rounded once. Where the pass would wait for divisions: a product, corrected by what it
 * lacks, which has the same bits (docs/design.md, "A quotient without a division"). Of Inf the rest is NaN, and then
 * `root` takes its place. */
static inline vec over_bc2s(const adam_scalars *k, vec root, int divides)
{
    if (divides)
        return vec_div(root, vec_set(k->bc2s));
    const vec inverse = vec_set(k->inverse), product = vec_mul(root, inverse);
    return vec_fma(vec_min(vec_fma(product, vec_set(-k->bc2s), root), root), inverse, product);
}

/* Advances m, v (and vmax, with AMSGRAD) by one step in place and returns the new parameter: p, decayed, plus the
 * update `q` of denominator `d`. */
static inline vec adam_formula(const adam_scalars *k, vec g, vec *m, vec *v, vec *vmax, vec p, vec *d, vec *q,
                               int divides)
{
    if (k->flags & SUPERADAM_SCALE) {
        g = vec_mul(g, vec_set(k->s));
        if (k->flags & SUPERADAM_ROUND)
            g = vec_round_bfloat16(g);
    }
    if (k->flags & SUPERADAM_MAXIMIZE)
        g = vec_neg(g);
    if (k->flags & SUPERADAM_DECOUPLED)
        p = vec_mul(p, vec_set(k->decay));
    if (k->flags & SUPERADAM_L2)
        g = vec_fma(p, vec_set(k->wd), g);

    vec difference = vec_sub(g, *m);
    if (k->w < (real)0.5)
        *m = vec_fma(vec_set(k->w), difference, *m);
    else /* the same interpolation, from its nearer end; w - 1 is exact here */
        *m = vec_fma(vec_set(k->w - 1), difference, g);
    *v = vec_fma(vec_mul(vec_set(k->c2), g), g, vec_mul(*v, vec_set(k->b2)));

    vec second = *v;
    if (k->flags & SUPERADAM_AMSGRAD)
        second = *vmax = vec_max(*vmax, *v);
    *d = vec_add(over_bc2s(k, vec_sqrt(second), divides), vec_set(k->eps));
    *q = vec_div(vec_mul(vec_set(k->nss), *m), *d);
    return vec_add(p, *q);
}
