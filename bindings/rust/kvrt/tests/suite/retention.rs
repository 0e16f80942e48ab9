//! Policies and compaction.

use kvrt::{
    CompressOutcome, Format, Model, Policy, Pool, Rope, RopeStyle, Scorer, Selection, Sequence,
    SequenceConfig, Status,
};

use crate::common::*;

/// The positions of the smallest key norms of one head, with the number that stays.
fn smallest_norms(
    text: &Text,
    layer: usize,
    head: usize,
    tokens: usize,
    budget: usize,
) -> Vec<u32> {
    let norm = |position: usize| -> f64 {
        let key = &text.keys(layer, position..position + 1)[head * 32..][..32];
        key.iter().map(|k| f64::from(*k) * f64::from(*k)).sum()
    };
    let mut order: Vec<usize> = (0..tokens).collect();
    order.sort_by(|&a, &b| norm(a).total_cmp(&norm(b)));
    let mut kept: Vec<u32> = order[..budget].iter().map(|&position| position as u32).collect();
    kept.sort_unstable();
    kept
}

#[test]
fn streaming_keeps_sinks_and_the_recent_and_returns_blocks() {
    let _session = Session::new();
    let pool = pool(2);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 2, 200, 51);
    text.run(&pool, sequence, 0..160);
    let before = pool.counters().pool().unwrap();
    let policy = Policy::new(Scorer::Streaming, 32).sinks(4);
    let report = pool.compress(sequence, Some(&policy)).unwrap();
    assert_eq!(report.outcome, CompressOutcome::Done);
    assert_eq!(report.layers, 2);
    // Two layers of two heads.
    assert_eq!((report.tokens_before, report.tokens_after), (4 * 160, 4 * 32));
    assert_eq!((report.blocks_before, report.blocks_after, report.blocks_returned), (20, 4, 16));
    assert_eq!(report.bytes_before - report.bytes_after, report.bytes_returned);
    let after = pool.counters().pool().unwrap();
    assert_eq!(after.live_blocks, 4);
    assert_eq!(after.blocks_returned_by_compaction - before.blocks_returned_by_compaction, 16);
    assert_eq!(after.bytes_returned - before.bytes_returned, report.bytes_returned);

    let kept: Vec<u32> = (0..4).chain(132..160).collect();
    assert_eq!(positions(&pool, sequence, 1, 1), kept);
    let visible = |token: usize| (0..4).chain(132..=token).collect::<Vec<usize>>();
    for (layer, found) in text.run(&pool, sequence, 160..170).iter().enumerate() {
        text.assert_outputs(layer, 160..170, found, 2e-6, &Rule::default(), visible);
    }
    assert_eq!(pool.sequence_info(sequence).unwrap().compactions, 1);
    pool.check().unwrap();
}

#[test]
fn a_policy_runs_at_step_ends() {
    let _session = Session::new();
    let pool = pool(1);
    let policy = Policy::new(Scorer::KeyNorm, 24).every(16);
    let sequence = pool.create_sequence(&SequenceConfig::new().policy(policy)).unwrap();
    let text = Text::new(SHAPE, 1, 100, 52);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 80, None).unwrap();
    step.reserve().unwrap();
    text.pass(&step, 0..80);
    let report = step.end().unwrap();
    assert_eq!((report.compactions, report.blocks_returned), (1, 3));
    for head in 0..2 {
        let expected = smallest_norms(&text, 0, head, 80, 24);
        assert_eq!(positions(&pool, sequence, 0, head as u32), expected);
    }
    // Too soon for another round, then without a policy, then with one again.
    text.run(&pool, sequence, 80..90);
    assert_eq!(pool.sequence_layer_info(sequence, 0).unwrap().retained, 34);
    pool.set_policy(sequence, None).unwrap();
    text.run(&pool, sequence, 90..98);
    assert_eq!(pool.sequence_layer_info(sequence, 0).unwrap().retained, 42);
    assert_error(pool.compress(sequence, None), Status::INVALID, "no policy");
    pool.set_policy(sequence, Some(&Policy::new(Scorer::Streaming, 16))).unwrap();
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!((report.outcome, report.tokens_after), (CompressOutcome::Done, 32));
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!(report.outcome, CompressOutcome::Nothing);
}

#[test]
fn a_prompt_is_protected_within_or_on_top_of_the_budget() {
    let _session = Session::new();
    let pool = pool(1);
    let text = Text::new(SHAPE, 1, 100, 53);
    let run = |policy: Policy| {
        let sequence = sequence(&pool);
        text.run(&pool, sequence, 0..100);
        pool.compress(sequence, Some(&policy)).unwrap();
        let kept = positions(&pool, sequence, 0, 0);
        pool.release_sequence(sequence).unwrap();
        kept
    };
    let policy = Policy::new(Scorer::Streaming, 20).prompt_tokens(12).protect_prompt(true);
    assert_eq!(run(policy.clone()), (0..12).chain(92..100).collect::<Vec<_>>());
    assert_eq!(run(policy.clone().prompt_on_top(true)), (0..12).chain(80..100).collect::<Vec<_>>());
    let by_bits = policy.clone().flag_bits(0);
    assert_eq!(run(by_bits.clone()), (80..100).collect::<Vec<_>>());
    assert_eq!(run(by_bits.protect_prompt(true)), run(policy));
}

#[test]
fn random_rounds_repeat_with_their_seed_and_unions_are_common() {
    let _session = Session::new();
    let pool = pool(2);
    let text = Text::new(SHAPE, 2, 100, 54);
    let run = |policy: &Policy| {
        let sequence = sequence(&pool);
        text.run(&pool, sequence, 0..100);
        pool.compress(sequence, Some(policy)).unwrap();
        let kept: Vec<_> = (0..4).map(|i| positions(&pool, sequence, i / 2, i % 2)).collect();
        pool.release_sequence(sequence).unwrap();
        kept
    };
    let policy = Policy::new(Scorer::Random, 30).recent(5);
    let first = run(&policy.clone().seed(7));
    assert!(first.iter().all(|kept| kept.len() == 30 && kept[25..] == [95, 96, 97, 98, 99]));
    assert_eq!(first, run(&policy.clone().seed(7)));
    assert_ne!(first, run(&policy.clone().seed(8)));
    assert_ne!(first[0], first[1], "each head draws its own");
    let union = run(&policy.selection(Selection::Union));
    assert!(union.iter().all(|kept| kept == &union[0]));
}

#[test]
fn a_round_inside_a_step_waits_for_its_end() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 100, 55);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 100, None).unwrap();
    step.reserve().unwrap();
    let policy = Policy::new(Scorer::Streaming, 10);
    let report = pool.compress(sequence, Some(&policy)).unwrap();
    assert_eq!(report.outcome, CompressOutcome::Deferred);
    text.pass(&step, 0..100);
    assert_eq!(step.end().unwrap().compactions, 1);
    assert_eq!(positions(&pool, sequence, 0, 0), (90..100).collect::<Vec<_>>());
}

#[test]
fn survivors_of_shared_blocks_are_copied() {
    let _session = Session::new();
    let pool = pool(1);
    let parent = sequence(&pool);
    let text = Text::new(SHAPE, 1, 100, 56);
    text.run(&pool, parent, 0..96);
    let mut child = [Sequence::default()];
    pool.fork_sequence(parent, &mut child).unwrap();
    let report = pool.compress(child[0], Some(&Policy::new(Scorer::Streaming, 32))).unwrap();
    assert_eq!((report.blocks_copied, report.blocks_returned), (2, 0));
    assert_eq!(positions(&pool, parent, 0, 0), (0..96).collect::<Vec<_>>());
    let found = text.run(&pool, parent, 96..100);
    text.assert_outputs(0, 96..100, &found[0], 2e-6, &Rule::default(), causal);
}

#[test]
fn skipped_layers_are_left_whole() {
    let _session = Session::new();
    let pool = pool(2);
    let sequence = sequence(&pool);
    Text::new(SHAPE, 2, 60, 59).run(&pool, sequence, 0..60);
    let policy = Policy::new(Scorer::KeyNorm, 20).skip_layers(1);
    assert_eq!(pool.compress(sequence, Some(&policy)).unwrap().layers, 1);
    let retained = [0, 1].map(|l| pool.sequence_layer_info(sequence, l).unwrap().retained);
    assert_eq!(retained, [60, 20]);
}

#[test]
fn elastic_pools_give_slabs_back() {
    let _session = Session::new();
    let config = config().elastic(true).max_tokens_per_sequence(16000).max_step_tokens(16000);
    let pool: Pool = create(&config, 1);
    let step = pool.begin_step().unwrap();
    step.append(sequence(&pool), 16000, None).unwrap();
    step.reserve().unwrap();
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.slabs_given_back, stats.slabs_resident), (0, 4));
    step.cancel().unwrap();
    // Two empty ones stay for whoever comes next.
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.slabs_given_back, stats.slabs_resident), (2, 2));
}

#[test]
fn triattention_wants_queries_and_a_rotation() {
    let _session = Session::new();
    let rope = Rope::new(RopeStyle::Half).theta(500.0).dimensions(32).attention_factor(1.0);
    let layer = SHAPE.layer().key_format(Format::F32);
    let pool = Pool::create(&config(), &Model::new([layer.clone().rope(rope)])).unwrap();
    let policy = Policy::new(Scorer::TriAttention, 20).offset_max(64).offsets_max(true);
    let config = SequenceConfig::new().policy(policy.statistics_online(true));
    let sequence = pool.create_sequence(&config).unwrap();
    let text = Text::new(SHAPE, 1, 100, 58);
    text.run(&pool, sequence, 0..100);
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!((report.outcome, report.tokens_after), (CompressOutcome::Done, 40));

    let unrotated = Pool::create(&crate::common::config(), &Model::new([layer])).unwrap();
    assert!(unrotated.create_sequence(&config).is_err());
}

#[test]
fn wrong_policies_are_refused() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let streaming = || Policy::new(Scorer::Streaming, 16);
    for policy in [
        Policy::new(Scorer::Streaming, 0),
        Policy::new(Scorer::Other(77), 16),
        streaming().selection(Selection::Other(9)),
        streaming().flag_bits(1 << 31),
    ] {
        for outcome in [
            pool.set_policy(sequence, Some(&policy)),
            pool.compress(sequence, Some(&policy)).map(drop),
            pool.create_sequence(&SequenceConfig::new().policy(policy.clone())).map(drop),
        ] {
            let error = outcome.expect_err("a wrong policy");
            assert!([Status::INVALID, Status::UNSUPPORTED].contains(&error.status()), "{error}");
        }
    }
    assert_eq!(pool.counters().pool().unwrap().sequences, 1);
}
