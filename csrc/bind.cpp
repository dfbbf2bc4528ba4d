// The table of contents of domino_kernels._C: every op, nothing else. How a call is made up of
// keywords stands in common/bind_op.h, the meaning of each field in the op's own header.
#include <pybind11/pybind11.h>

#include "common/bind_op.h"
#include "common/dtype.h"
#include "head/draft_chain.h"
#include "head/expand.h"
#include "head/grow_tree.h"
#include "head/gru_step.h"
#include "head/project_hidden.h"
#include "head/shortlist.h"
#include "head/vocab_winners.h"
#include "tree/bind_accepted_path.h"
#include "tree/build_tree.h"
#include "verify/noise.h"
#include "verify/row_stats.h"
#include "verify/verify_chain.h"
#include "verify/verify_shard.h"
#include "verify/verify_tree.h"

namespace domino {

namespace {

// An op whose Params are those of verify_chain or begin with them: its own fields, then those of
// the call.
template <class P, class... Own>
void bind_chain_op(pybind11::module_& m, const char* name, int (*cuda)(const P&, void*),
                   int (*cpu)(const P&), Own... own) {
  using Chain = VerifyChainParams;
  const auto field = [](const char* keyword, auto Chain::* member) {
    using T = std::remove_reference_t<decltype(std::declval<P&>().*member)>;
    return Field<P, T>{keyword, member};
  };
  bind_op<P>(
      m, name, cuda, cpu, own..., field("workspace", &Chain::workspace),
      field("target_logits", &Chain::target_logits), field("draft_tokens", &Chain::draft_tokens),
      field("rules", &Chain::rules), field("temperature", &Chain::temperature),
      field("seed", &Chain::seed), field("block_start", &Chain::block_start),
      field("draft_logits", &Chain::draft_logits), field("draft_ids", &Chain::draft_ids),
      field("draft_logprob", &Chain::draft_logprob),
      field("draft_temperature", &Chain::draft_temperature), field("cu_rows", &Chain::cu_rows),
      field("num_active", &Chain::num_active), field("residual_slot", &Chain::residual_slot),
      field("top_k", &Chain::top_k), field("top_p", &Chain::top_p), field("min_p", &Chain::min_p),
      field("logit_bias", &Chain::logit_bias),
      field("repetition_penalty", &Chain::repetition_penalty),
      field("presence_penalty", &Chain::presence_penalty),
      field("frequency_penalty", &Chain::frequency_penalty),
      field("prompt_mask", &Chain::prompt_mask), field("output_counts", &Chain::output_counts),
      field("grammar_mask", &Chain::grammar_mask), field("batch", &Chain::batch),
      field("drafts", &Chain::drafts), field("vocab", &Chain::vocab), field("pool", &Chain::pool),
      field("top_logprobs", &Chain::top_logprobs), field("total_rows", &Chain::total_rows),
      field("target_batch_stride", &Chain::target_batch_stride),
      field("target_row_stride", &Chain::target_row_stride),
      field("draft_tokens_stride", &Chain::draft_tokens_stride),
      field("draft_batch_stride", &Chain::draft_batch_stride),
      field("draft_row_stride", &Chain::draft_row_stride),
      field("ids_batch_stride", &Chain::ids_batch_stride),
      field("ids_row_stride", &Chain::ids_row_stride), field("bias_stride", &Chain::bias_stride),
      field("prompt_stride", &Chain::prompt_stride), field("counts_stride", &Chain::counts_stride),
      field("grammar_batch_stride", &Chain::grammar_batch_stride),
      field("grammar_row_stride", &Chain::grammar_row_stride), field("rule", &Chain::rule),
      field("filter_order", &Chain::filter_order), field("target_dtype", &Chain::target_dtype),
      field("draft_dtype", &Chain::draft_dtype));
}

}  // namespace

}  // namespace domino

PYBIND11_MODULE(_C, m) {
  using namespace domino;
  m.doc() = "CUDA kernels and their CPU twins; use the public functions of domino_kernels";
  m.attr("F32") = static_cast<int>(DType::kF32);
  m.attr("F16") = static_cast<int>(DType::kF16);
  m.attr("BF16") = static_cast<int>(DType::kBF16);
  m.def("status_name", &status_name, pybind11::arg("status"));
  m.def("status_text", &status_text, pybind11::arg("status"));

  bind_op<GruStepParams>(
      m, "gru_step", DOMINO_CUDA_LAUNCHER(gru_step_cuda), gru_step_cpu,
      field("out", &GruStepParams::out), field("x", &GruStepParams::x),
      field("state", &GruStepParams::state), field("w_ih", &GruStepParams::w_ih),
      field("w_hh", &GruStepParams::w_hh), field("batch", &GruStepParams::batch),
      field("inputs", &GruStepParams::inputs), field("units", &GruStepParams::units),
      field("out_stride", &GruStepParams::out_stride), field("x_stride", &GruStepParams::x_stride),
      field("state_stride", &GruStepParams::state_stride), field("dtype", &GruStepParams::dtype));

  bind_op<DraftChainParams>(
      m, "draft_chain", DOMINO_CUDA_LAUNCHER(draft_chain_cuda), draft_chain_cpu,
      field("tokens", &DraftChainParams::tokens), field("scores", &DraftChainParams::scores),
      field("workspace", &DraftChainParams::workspace),
      field("base_logits", &DraftChainParams::base_logits),
      field("hidden", &DraftChainParams::hidden), field("anchor", &DraftChainParams::anchor),
      field("w_ih", &DraftChainParams::w_ih), field("w_hh", &DraftChainParams::w_hh),
      field("w1", &DraftChainParams::w1), field("w2", &DraftChainParams::w2),
      field("embedding", &DraftChainParams::embedding), field("batch", &DraftChainParams::batch),
      field("drafts", &DraftChainParams::drafts),
      field("first_slot", &DraftChainParams::first_slot),
      field("prefix", &DraftChainParams::prefix), field("vocab", &DraftChainParams::vocab),
      field("inputs", &DraftChainParams::inputs), field("units", &DraftChainParams::units),
      field("hidden_width", &DraftChainParams::hidden_width),
      field("rank", &DraftChainParams::rank), field("kind", &DraftChainParams::kind),
      field("base_batch_stride", &DraftChainParams::base_batch_stride),
      field("base_slot_stride", &DraftChainParams::base_slot_stride),
      field("hidden_batch_stride", &DraftChainParams::hidden_batch_stride),
      field("hidden_slot_stride", &DraftChainParams::hidden_slot_stride),
      field("table", &DraftChainParams::table), field("screen", &DraftChainParams::screen),
      field("num_active", &DraftChainParams::num_active),
      field("temperature", &DraftChainParams::temperature), field("seed", &DraftChainParams::seed),
      field("block_start", &DraftChainParams::block_start), field("mask", &DraftChainParams::mask),
      field("bias", &DraftChainParams::bias), field("mask_stride", &DraftChainParams::mask_stride),
      field("bias_stride", &DraftChainParams::bias_stride),
      field("vocab_valid", &DraftChainParams::vocab_valid),
      field("pool_size", &DraftChainParams::pool_size), field("pools", &DraftChainParams::pools),
      field("exact", &DraftChainParams::exact), field("portable", &DraftChainParams::portable),
      field("pool_ids", &DraftChainParams::pool_ids),
      field("restarts", &DraftChainParams::restarts),
      field("pool_logits", &DraftChainParams::pool_logits),
      field("log_probs", &DraftChainParams::log_probs),
      field("dense_logits", &DraftChainParams::dense_logits),
      field("dtype", &DraftChainParams::dtype), field("base_dtype", &DraftChainParams::base_dtype));
  m.def(
      "draft_chain_workspace",
      [](int64_t batch, int64_t drafts, int64_t prefix, int64_t vocab, int64_t units, int64_t rank,
         int64_t pool_size, int64_t pools) {
        DraftChainParams p{};
        p.batch = batch, p.drafts = drafts, p.prefix = prefix, p.vocab = vocab;
        p.units = units, p.rank = rank, p.pool_size = pool_size, p.pools = pools;
        return draft_chain_workspace(p);
      },
      pybind11::kw_only(), pybind11::arg("batch"), pybind11::arg("drafts"), pybind11::arg("prefix"),
      pybind11::arg("vocab"), pybind11::arg("units"), pybind11::arg("rank"),
      pybind11::arg("pool_size"), pybind11::arg("pools"));

  bind_op<ExpandParams>(
      m, "expand", DOMINO_CUDA_LAUNCHER(expand_cuda), expand_cpu,
      field("states", &ExpandParams::states), field("tokens", &ExpandParams::tokens),
      field("log_probs", &ExpandParams::log_probs),
      field("log_remaining", &ExpandParams::log_remaining), field("scores", &ExpandParams::scores),
      field("workspace", &ExpandParams::workspace),
      field("base_logits", &ExpandParams::base_logits), field("hidden", &ExpandParams::hidden),
      field("from_hidden", &ExpandParams::from_hidden),
      field("parent_states", &ExpandParams::parent_states), field("parent", &ExpandParams::parent),
      field("token", &ExpandParams::token), field("path_depth", &ExpandParams::path_depth),
      field("node", &ExpandParams::node), field("pool", &ExpandParams::pool),
      field("temperature", &ExpandParams::temperature), field("seed", &ExpandParams::seed),
      field("block_start", &ExpandParams::block_start), field("w_ih", &ExpandParams::w_ih),
      field("w_hh", &ExpandParams::w_hh), field("w1", &ExpandParams::w1),
      field("w2", &ExpandParams::w2), field("embedding", &ExpandParams::embedding),
      field("table", &ExpandParams::table), field("batch", &ExpandParams::batch),
      field("paths", &ExpandParams::paths), field("children", &ExpandParams::children),
      field("candidates", &ExpandParams::candidates), field("slots", &ExpandParams::slots),
      field("nodes", &ExpandParams::nodes), field("score_nodes", &ExpandParams::score_nodes),
      field("first_slot", &ExpandParams::first_slot), field("depth", &ExpandParams::depth),
      field("prefix", &ExpandParams::prefix), field("vocab", &ExpandParams::vocab),
      field("inputs", &ExpandParams::inputs), field("hidden_width", &ExpandParams::hidden_width),
      field("units", &ExpandParams::units), field("rank", &ExpandParams::rank),
      field("base_batch_stride", &ExpandParams::base_batch_stride),
      field("base_slot_stride", &ExpandParams::base_slot_stride),
      field("hidden_batch_stride", &ExpandParams::hidden_batch_stride),
      field("hidden_slot_stride", &ExpandParams::hidden_slot_stride),
      field("parent_batch_stride", &ExpandParams::parent_batch_stride),
      field("parent_stride", &ExpandParams::parent_stride),
      field("states_batch_stride", &ExpandParams::states_batch_stride),
      field("states_stride", &ExpandParams::states_stride), field("dtype", &ExpandParams::dtype),
      field("base_dtype", &ExpandParams::base_dtype), field("kind", &ExpandParams::kind),
      field("drawn", &ExpandParams::drawn));

  bind_op<GrowTreeParams>(
      m, "grow_tree", DOMINO_CUDA_LAUNCHER(grow_tree_cuda), grow_tree_cpu,
      field("tokens", &GrowTreeParams::tokens), field("parents", &GrowTreeParams::parents),
      field("log_probs", &GrowTreeParams::log_probs),
      field("log_remaining", &GrowTreeParams::log_remaining),
      field("next_token", &GrowTreeParams::next_token),
      field("next_node", &GrowTreeParams::next_node),
      field("next_parent", &GrowTreeParams::next_parent),
      field("next_log_prob", &GrowTreeParams::next_log_prob),
      field("token", &GrowTreeParams::token), field("log_prob", &GrowTreeParams::log_prob),
      field("remaining", &GrowTreeParams::remaining), field("node", &GrowTreeParams::node),
      field("path_log_prob", &GrowTreeParams::path_log_prob),
      field("batch", &GrowTreeParams::batch), field("paths", &GrowTreeParams::paths),
      field("children", &GrowTreeParams::children),
      field("next_paths", &GrowTreeParams::next_paths),
      field("candidates", &GrowTreeParams::candidates), field("first", &GrowTreeParams::first),
      field("first_row", &GrowTreeParams::first_row));

  bind_op<ProjectHiddenParams>(
      m, "project_hidden", DOMINO_CUDA_LAUNCHER(project_hidden_cuda), project_hidden_cpu,
      field("out", &ProjectHiddenParams::out), field("hidden", &ProjectHiddenParams::hidden),
      field("w1", &ProjectHiddenParams::w1), field("batch", &ProjectHiddenParams::batch),
      field("slots", &ProjectHiddenParams::slots), field("rank", &ProjectHiddenParams::rank),
      field("width", &ProjectHiddenParams::width),
      field("w1_stride", &ProjectHiddenParams::w1_stride),
      field("hidden_batch_stride", &ProjectHiddenParams::hidden_batch_stride),
      field("hidden_slot_stride", &ProjectHiddenParams::hidden_slot_stride),
      field("dtype", &ProjectHiddenParams::dtype));

  using Shortlist = ShortlistParams;
  bind_op<Shortlist>(
      m, "shortlist", DOMINO_CUDA_LAUNCHER(shortlist_cuda), shortlist_cpu,
      field("ids", &Shortlist::ids), field("scores", &Shortlist::scores),
      field("workspace", &Shortlist::workspace), field("base_logits", &Shortlist::base_logits),
      field("mask", &Shortlist::mask), field("bias", &Shortlist::bias),
      field("num_active", &Shortlist::num_active), field("batch", &Shortlist::batch),
      field("slots", &Shortlist::slots), field("vocab", &Shortlist::vocab),
      field("vocab_valid", &Shortlist::vocab_valid), field("pools", &Shortlist::pools),
      field("size", &Shortlist::size), field("base_batch_stride", &Shortlist::base_batch_stride),
      field("base_slot_stride", &Shortlist::base_slot_stride),
      field("mask_stride", &Shortlist::mask_stride), field("bias_stride", &Shortlist::bias_stride),
      field("dtype", &Shortlist::dtype), field("portable", &Shortlist::portable));
  m.def("shortlist_workspace", &shortlist_workspace, pybind11::kw_only(), pybind11::arg("batch"),
        pybind11::arg("pools"), pybind11::arg("vocab"));

  using Winners = VocabWinnersParams;
  bind_op<Winners>(m, "vocab_winners", DOMINO_CUDA_LAUNCHER(vocab_winners_cuda), vocab_winners_cpu,
                   field("keys", &Winners::keys), field("base_logits", &Winners::base_logits),
                   field("low_rank", &Winners::low_rank), field("w2", &Winners::w2),
                   field("mask", &Winners::mask), field("bias", &Winners::bias),
                   field("num_active", &Winners::num_active), field("batch", &Winners::batch),
                   field("slots", &Winners::slots), field("vocab", &Winners::vocab),
                   field("vocab_valid", &Winners::vocab_valid), field("rank", &Winners::rank),
                   field("first_id", &Winners::first_id),
                   field("base_batch_stride", &Winners::base_batch_stride),
                   field("base_slot_stride", &Winners::base_slot_stride),
                   field("low_rank_batch_stride", &Winners::low_rank_batch_stride),
                   field("low_rank_slot_stride", &Winners::low_rank_slot_stride),
                   field("mask_stride", &Winners::mask_stride),
                   field("bias_stride", &Winners::bias_stride), field("dtype", &Winners::dtype),
                   field("base_dtype", &Winners::base_dtype));

  using Noise = NoiseParams;
  bind_op<Noise>(m, "noise", DOMINO_CUDA_LAUNCHER(noise_cuda), noise_cpu, field("out", &Noise::out),
                 field("seed", &Noise::seed), field("block_start", &Noise::block_start),
                 field("batch", &Noise::batch), field("count", &Noise::count),
                 field("i", &Noise::i), field("purpose", &Noise::purpose),
                 field("kind", &Noise::kind));

  using Chain = VerifyChainParams;
  bind_chain_op<Chain>(m, "verify_chain", DOMINO_CUDA_LAUNCHER(verify_chain_cuda), verify_chain_cpu,
                       field("tokens", &Chain::tokens), field("num_accepted", &Chain::num_accepted),
                       field("num_emitted", &Chain::num_emitted),
                       field("chosen_logprob", &Chain::chosen_logprob),
                       field("status", &Chain::status), field("top_ids", &Chain::top_ids),
                       field("top_logprob", &Chain::top_logprob));
  m.def("verify_chain_workspace", &verify_chain_workspace, pybind11::kw_only(),
        pybind11::arg("batch"), pybind11::arg("drafts"), pybind11::arg("vocab"),
        pybind11::arg("dense"));

  using Rows = RowStatsParams;
  bind_op<Rows>(m, "row_stats", DOMINO_CUDA_LAUNCHER(row_stats_cuda), row_stats_cpu,
                field("lse", &Rows::lse), field("argmax", &Rows::argmax),
                field("logprob", &Rows::logprob), field("status", &Rows::status),
                field("partials", &Rows::partials), field("top_ids", &Rows::top_ids),
                field("top_logprob", &Rows::top_logprob), field("workspace", &Rows::workspace),
                field("logits", &Rows::logits), field("tokens", &Rows::tokens),
                field("temperature", &Rows::temperature), field("rows", &Rows::rows),
                field("vocab", &Rows::vocab), field("vocab_start", &Rows::vocab_start),
                field("vocab_total", &Rows::vocab_total), field("row_stride", &Rows::row_stride),
                field("parts", &Rows::parts), field("top_logprobs", &Rows::top_logprobs),
                field("dtype", &Rows::dtype));
  bind_op<Rows>(m, "combine_row_stats", DOMINO_CUDA_LAUNCHER(combine_row_stats_cuda),
                combine_row_stats_cpu, field("lse", &Rows::lse), field("argmax", &Rows::argmax),
                field("logprob", &Rows::logprob), field("status", &Rows::status),
                field("partials", &Rows::partials), field("top_ids", &Rows::top_ids),
                field("top_logprob", &Rows::top_logprob), field("workspace", &Rows::workspace),
                field("logits", &Rows::logits), field("tokens", &Rows::tokens),
                field("temperature", &Rows::temperature), field("rows", &Rows::rows),
                field("vocab", &Rows::vocab), field("vocab_start", &Rows::vocab_start),
                field("vocab_total", &Rows::vocab_total), field("row_stride", &Rows::row_stride),
                field("parts", &Rows::parts), field("top_logprobs", &Rows::top_logprobs),
                field("dtype", &Rows::dtype));
  using Shard = VerifyShardParams;
  const auto bind_shard_op = [&](const char* name, auto cuda, auto cpu) {
    bind_chain_op<Shard>(
        m, name, cuda, cpu, field("verdict", &Shard::verdict),
        field("slot_status", &Shard::slot_status), field("logprob", &Shard::logprob),
        field("keys", &Shard::keys), field("key_logprob", &Shard::key_logprob),
        field("draft_laws", &Shard::draft_laws), field("row_masses", &Shard::row_masses),
        field("partials", &Shard::partials), field("parts", &Shard::parts),
        field("listed", &Shard::listed), field("vocab_start", &Shard::vocab_start),
        field("shard_vocab", &Shard::shard_vocab));
  };
  bind_shard_op("verify_shard_rows", DOMINO_CUDA_LAUNCHER(verify_shard_rows_cuda),
                verify_shard_rows_cpu);
  bind_shard_op("verify_shard", DOMINO_CUDA_LAUNCHER(verify_shard_cuda), verify_shard_cpu);
  using Tree = VerifyTreeParams;
  bind_op<Tree>(
      m, "verify_tree", DOMINO_CUDA_LAUNCHER(verify_tree_cuda), verify_tree_cpu,
      field("out_tokens", &Tree::out_tokens), field("path", &Tree::path),
      field("num_accepted", &Tree::num_accepted), field("num_emitted", &Tree::num_emitted),
      field("chosen_logprob", &Tree::chosen_logprob), field("status", &Tree::status),
      field("workspace", &Tree::workspace), field("target_logits", &Tree::target_logits),
      field("tokens", &Tree::tokens), field("parents", &Tree::parents),
      field("temperature", &Tree::temperature), field("seed", &Tree::seed),
      field("block_start", &Tree::block_start), field("pool_ids", &Tree::pool_ids),
      field("pool_logits", &Tree::pool_logits), field("draft_logits", &Tree::draft_logits),
      field("draft_temperature", &Tree::draft_temperature), field("top_k", &Tree::top_k),
      field("top_p", &Tree::top_p), field("min_p", &Tree::min_p),
      field("cu_nodes", &Tree::cu_nodes), field("batch", &Tree::batch),
      field("width", &Tree::width), field("vocab", &Tree::vocab),
      field("total_nodes", &Tree::total_nodes), field("pool", &Tree::pool),
      field("target_batch_stride", &Tree::target_batch_stride),
      field("target_node_stride", &Tree::target_node_stride),
      field("tokens_stride", &Tree::tokens_stride), field("parents_stride", &Tree::parents_stride),
      field("ids_batch_stride", &Tree::ids_batch_stride),
      field("ids_node_stride", &Tree::ids_node_stride),
      field("pool_batch_stride", &Tree::pool_batch_stride),
      field("pool_node_stride", &Tree::pool_node_stride),
      field("draft_batch_stride", &Tree::draft_batch_stride),
      field("draft_node_stride", &Tree::draft_node_stride),
      field("target_dtype", &Tree::target_dtype), field("draft_dtype", &Tree::draft_dtype),
      field("rule", &Tree::rule), field("filter_order", &Tree::filter_order));
  m.def("verify_tree_workspace", &verify_tree_workspace, pybind11::kw_only(),
        pybind11::arg("batch"), pybind11::arg("width"), pybind11::arg("vocab"),
        pybind11::arg("pool"), pybind11::arg("dense"), pybind11::arg("filtered"));

  using Build = BuildTreeParams;
  bind_op<Build>(
      m, "build_tree", DOMINO_CUDA_LAUNCHER(build_tree_cuda), build_tree_cpu,
      field("out_tokens", &Build::out_tokens), field("out_parents", &Build::out_parents),
      field("out_index", &Build::out_index), field("out_depth", &Build::out_depth),
      field("out_position", &Build::out_position), field("mask", &Build::mask),
      field("status", &Build::status), field("root", &Build::root), field("tokens", &Build::tokens),
      field("parents", &Build::parents), field("scores", &Build::scores),
      field("prefix", &Build::prefix), field("batch", &Build::batch),
      field("candidates", &Build::candidates), field("nodes", &Build::nodes),
      field("columns", &Build::columns), field("tokens_stride", &Build::tokens_stride),
      field("parents_stride", &Build::parents_stride),
      field("scores_stride", &Build::scores_stride), field("mask_kind", &Build::mask_kind));
  bind_accepted_path(m);
}
