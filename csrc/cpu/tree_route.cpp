// The conditional descent of the tree gate on the CPU (definition: tree_route in python_ref/tree_gate.py).
//
// A block of tokens descends a tree together, so that a node's weights come from memory once for all of these tokens
// that reach the node. If a node is saturated for a token, the token goes left or right. If not, or if the node's
// pre-activation is NaN, the token leaves the block: the tree below the node is searched for this token alone,
// likeliest node first.

#include "ops.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "moe/cpu/exp.h"
#include "moe/cpu/formats.h"
#include "moe/cpu/lanes.h"
#include "tree.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kBlock = 128;  // tokens of a block
constexpr int kTokensAtOnce = 4;  // tokens that one pass over a row of weights multiplies

template <class Wide>
struct Candidate {
  Wide prob;
  int64_t node;
  bool operator<(const Candidate& other) const { return prob < other.prob; }
};

template <class F>
class Descent {
 public:
  using Key = typename F::Key;
  using Wide = typename F::Wide;

  struct Weights {
    const Key *split, *leaf, *split_bias, *leaf_bias;  // (K, E-1, P), (K, E, P), (K, E-1), (K, E); biases may be null
  };
  struct Results {
    Wide* logits;  // (T, K), as the other arrays; merge_trees replaces logits by weights
    int32_t *experts, *visited;
    uint8_t* unsaturated;
  };

  Descent(const Weights& weights, const Results& results, const Step<Wide>& step, int64_t dim, int64_t trees,
          int64_t experts, char* room)
      : weights_(weights), results_(results), step_(step), leaves_(experts), dim_(dim), trees_(trees),
        experts_(experts) {
    frontier_ = reinterpret_cast<Candidate<Wide>*>(room);
    wide_x_ = reinterpret_cast<Wide*>(frontier_ + experts + 1);
    wide_row_ = wide_x_ + kBlock * dim;
    order_ = reinterpret_cast<int32_t*>(wide_row_ + dim);
    others_ = order_ + kBlock;
    logit_ = reinterpret_cast<Wide*>(others_ + kBlock);
  }

  // Routes tokens first to first + count - 1 of x (T, P); count <= kBlock.
  void run(const Key* x, int64_t stride, int64_t first, int64_t count) {
    first_ = first;
    if constexpr (std::is_same_v<F, Float32> || std::is_same_v<F, Float64>) {
      x_ = reinterpret_cast<const Wide*>(x + first * stride), stride_ = stride;
    } else {
      for (int64_t i = 0; i < count; ++i) widen(x + (first + i) * stride, wide_x_ + i * dim_);
      x_ = wide_x_, stride_ = dim_;
    }
    for (tree_ = 0; tree_ < trees_; ++tree_) {
      for (int64_t i = 0; i < count; ++i) order_[i] = int32_t(i);
      descend(0, 0, count, 0);
    }
    for (int64_t i = 0; i < count; ++i) merge_trees(first + i);
  }

 private:
  void widen(const Key* from, Wide* to) const {
    for (int64_t i = 0; i < dim_; ++i) to[i] = F::widen(from[i]);
  }

  const Wide* row(const Key* weight) const {
    if constexpr (std::is_same_v<F, Float32> || std::is_same_v<F, Float64>) {
      return reinterpret_cast<const Wide*>(weight);
    } else {
      widen(weight, wide_row_);
      return wide_row_;
    }
  }

  template <int count>
  void products(const Wide* w, const int32_t* tokens, Wide bias, Wide* out) const {
    constexpr int lanes = kLanes<Wide>;
    const Wide* x[count];
    Vec<Wide> even[count] = {}, odd[count] = {};
    Wide rest[count] = {};
    for (int i = 0; i < count; ++i) x[i] = x_ + tokens[i] * stride_;
    int64_t j = 0;
    for (; j + 2 * lanes <= dim_; j += 2 * lanes) {
      const Vec<Wide> first = load(w + j), second = load(w + j + lanes);
      for (int i = 0; i < count; ++i) even[i] += first * load(x[i] + j), odd[i] += second * load(x[i] + j + lanes);
    }
    for (; j < dim_; ++j)
      for (int i = 0; i < count; ++i) rest[i] += w[j] * x[i][j];
    for (int i = 0; i < count; ++i) {
      const Wide sum = across<Wide>(even[i] + odd[i], [](Vec<Wide> a, Vec<Wide> b) { return a + b; })[0] + rest[i];
      out[i] = F::widen(F::narrow(sum + bias));  // rounded to the dtype of x, as in the definition
    }
  }

  // logit_[i] = <row `index` of weight, x of token order_[i]> + bias[index], for begin <= i < end.
  void products(const Key* weight, const Key* bias, int64_t index, int64_t begin, int64_t end) const {
    const Wide *w = row(weight + index * dim_), b = bias == nullptr ? Wide(0) : F::widen(bias[index]);
    for (; begin + kTokensAtOnce <= end; begin += kTokensAtOnce)
      products<kTokensAtOnce>(w, order_ + begin, b, logit_ + begin);
    for (; begin < end; ++begin) products<1>(w, order_ + begin, b, logit_ + begin);
  }

  int64_t node_row(int64_t node) const { return tree_ * (experts_ - 1) + node; }

  // Routes the tokens order_[begin] to order_[end - 1] from `node`, which all of them reach, downwards.
  void descend(int64_t node, int64_t begin, int64_t end, int32_t depth) {
    if (begin == end) return;
    if (node >= experts_ - 1) {
      const int64_t expert = leaves_.expert(node);
      products(weights_.leaf, weights_.leaf_bias, tree_ * experts_ + expert, begin, end);
      for (; begin < end; ++begin) write_leaf(order_[begin], expert, logit_[begin], depth, false);
      return;
    }
    products(weights_.split, weights_.split_bias, node_row(node), begin, end);
    int64_t left = begin, right = 0, undecided = kBlock;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t token = order_[i];
      const Wide t = logit_[i];
      if (t >= step_.half) {
        order_[left++] = token;
      } else if (t <= -step_.half) {
        others_[right++] = token;
      } else {
        others_[--undecided] = token;
      }
    }
    std::copy(others_, others_ + right, order_ + left);
    const int64_t alone = left + right;
    std::copy(others_ + undecided, others_ + kBlock, order_ + alone);
    // order_ now has tokens that go left (before `left`), that go right (before `alone`), and that leave the block.
    for (int64_t i = alone; i < end; ++i) search(order_[i], node, depth);
    descend(2 * node + 1, begin, left, depth + 1);
    descend(2 * node + 2, left, alone, depth + 1);
  }

  // Finds the likeliest leaf under `start`, among equals the left-most. The token reaches `start` with probability 1.
  // Nodes are expanded in descending probability, while the next one is at least as likely as the best leaf found.
  void search(int32_t token, int64_t start, int32_t visited) {
    Candidate<Wide>* end = frontier_;
    Candidate<Wide> best{Wide(-1), 0};
    bool unknown = false, unsaturated = false;
    const auto add_candidate = [&](Wide prob, int64_t node) {
      if (node < experts_ - 1) {
        *end++ = {prob, node};
        std::push_heap(frontier_, end);
      } else if (prob > best.prob || (prob == best.prob && leaves_.expert(node) < leaves_.expert(best.node))) {
        best = {prob, node};
      }
    };
    add_candidate(1, start);
    while (end != frontier_ && frontier_->prob >= best.prob) {
      const Candidate<Wide> here = *frontier_;
      std::pop_heap(frontier_, end--);
      ++visited;
      const Wide t = product(token, weights_.split, weights_.split_bias, node_row(here.node));
      const Wide low = step_.low(t), high = 1 - low;
      if (t != t) {  // the token goes left with probability 1, and its logit is NaN
        unknown = true;
        add_candidate(here.prob, 2 * here.node + 1);
        continue;
      }
      unsaturated |= low > 0;
      if (t > 0 || low > 0) add_candidate(here.prob * (t < 0 ? low : high), 2 * here.node + 1);
      if (t < 0 || low > 0) add_candidate(here.prob * (t < 0 ? high : low), 2 * here.node + 2);
    }
    const int64_t expert = leaves_.expert(best.node);
    const Wide logit = product(token, weights_.leaf, weights_.leaf_bias, tree_ * experts_ + expert);
    write_leaf(token, expert, unknown ? std::numeric_limits<Wide>::quiet_NaN() : logit, visited, unsaturated);
  }

  Wide product(int32_t token, const Key* weight, const Key* bias, int64_t index) const {
    Wide out;
    products<1>(row(weight + index * dim_), &token, bias == nullptr ? Wide(0) : F::widen(bias[index]), &out);
    return out;
  }

  void write_leaf(int32_t token, int64_t expert, Wide logit, int32_t visited, bool unsaturated) const {
    const int64_t index = (first_ + token) * trees_ + tree_;
    results_.logits[index] = logit;
    results_.experts[index] = int32_t(expert);
    results_.visited[index] = visited;
    results_.unsaturated[index] = unsaturated;
  }

  // Replaces a token's logits by a softmax over trees. Of trees that chose the same expert, the first gets the sum of
  // their weights, the others weight 0 and expert -1.
  void merge_trees(int64_t token) const {
    Wide* weight = results_.logits + token * trees_;
    int32_t* expert = results_.experts + token * trees_;
    const Wide highest = *std::max_element(weight, weight + trees_);
    Wide sum = 0;
    for (int64_t k = 0; k < trees_; ++k) sum += weight[k] = exp(weight[k] - highest);
    for (int64_t k = 0; k < trees_; ++k) {
      weight[k] /= sum;
      for (int64_t earlier = 0; earlier < k; ++earlier)
        if (expert[earlier] == expert[k]) {
          weight[earlier] += weight[k], weight[k] = 0, expert[k] = -1;
          break;
        }
    }
  }

  const Weights weights_;
  const Results results_;
  const Step<Wide> step_;
  const Leaves leaves_;
  const int64_t dim_, trees_, experts_;
  int64_t tree_ = 0, first_ = 0, stride_ = 0;
  const Wide* x_ = nullptr;
  Wide *wide_x_, *wide_row_, *logit_;  // (kBlock, P), (P), (kBlock)
  int32_t *order_, *others_;           // (kBlock); others_: at its start tokens that go right, at its end leaving ones
  Candidate<Wide>* frontier_;          // (E + 1)
};

template <class F>
void route(const void* x, int64_t stride, const void* split_weight, const void* leaf_weight, const void* split_bias,
           const void* leaf_bias, void* weights, int32_t* experts, int32_t* visited, uint8_t* unsaturated,
           char* scratch, int64_t scratch_stride, int64_t tokens, int64_t dim, int64_t trees, int64_t num_experts,
           double gamma, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  const auto keys = [](const void* from) { return static_cast<const Key*>(from); };
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    Descent<F> descent({keys(split_weight), keys(leaf_weight), keys(split_bias), keys(leaf_bias)},
                       {static_cast<Wide*>(weights), experts, visited, unsaturated}, Step<Wide>(gamma), dim, trees,
                       num_experts, scratch + worker * scratch_stride);
    for (int64_t block = worker * blocks / threads; block < (worker + 1) * blocks / threads; ++block)
      descent.run(keys(x), stride, block * kBlock, std::min(kBlock, tokens - block * kBlock));
  }
}

}  // namespace

void tree_route_fwd(int dtype, const void* x, int64_t stride, const void* split_weight, const void* leaf_weight,
                    const void* split_bias, const void* leaf_bias, void* weights, int32_t* experts, int32_t* visited,
                    void* unsaturated, void* scratch, int64_t scratch_stride, int64_t tokens, int64_t dim,
                    int64_t trees, int64_t num_experts, double gamma, int threads) {
  with_format(dtype, [&](auto format) {
    route<decltype(format)>(x, stride, split_weight, leaf_weight, split_bias, leaf_bias, weights, experts, visited,
                            static_cast<uint8_t*>(unsaturated), static_cast<char*>(scratch), scratch_stride, tokens,
                            dim, trees, num_experts, gamma, threads);
  });
}

}  // namespace MOE_ISA
}  // namespace moe
