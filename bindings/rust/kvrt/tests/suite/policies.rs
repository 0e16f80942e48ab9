//! Policies by scores of the host and by observed attention, budgets shared among heads, what a
//! policy takes and what it has done.

use kvrt::{
    Allocator, CompressOutcome, Format, Model, Policy, Pool, PoolConfig, Scorer, Selection,
    SequenceConfig, Status, TableBuffers,
};

use crate::common::*;

/// A pool of one layer in f32 whose policies may keep scores, its heads' lanes together or apart.
fn observing_pool(lane_per_head: bool) -> Pool {
    let layer = SHAPE.layer().key_format(Format::F32).lane_per_head(lane_per_head);
    Pool::create(&config().max_observed_sequences(2), &Model::new([layer])).unwrap()
}

fn scores(pool: &Pool, sequence: kvrt::Sequence, head: u32) -> Vec<f32> {
    let count = pool.scores(sequence, 0, head, &mut []).unwrap();
    let mut scores = vec![f32::NAN; count];
    assert_eq!(pool.scores(sequence, 0, head, &mut scores).unwrap(), count);
    scores
}

/// The `count` positions with the largest numbers, ascending.
fn largest(numbers: &[f64], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..numbers.len() as u32).collect();
    order.sort_by(|&a, &b| numbers[b as usize].total_cmp(&numbers[a as usize]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// What all tokens of a text together give each other in attention, over the query heads of a KV
/// head, by the definition.
fn given_attention(text: &Text, kv_head: usize, tokens: usize) -> Vec<f64> {
    let Shape { query_heads, kv_heads, key_dim, .. } = text.shape;
    let group = query_heads / kv_heads;
    let mut sums = vec![0.0; tokens];
    for token in 0..tokens {
        for head in kv_head * group..(kv_head + 1) * group {
            let query = &text.queries(0, token..token + 1)[head * key_dim..][..key_dim];
            let weight = |position: usize| -> f64 {
                let key = &text.keys(0, position..position + 1)[kv_head * key_dim..][..key_dim];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(q * k)).sum();
                (dot / (key_dim as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (0..=token).map(weight).collect();
            let total: f64 = weights.iter().sum();
            for (sum, weight) in sums.iter_mut().zip(&weights) {
                *sum += weight / total;
            }
        }
    }
    sums
}

#[test]
fn every_setter_of_a_policy_has_its_field() {
    let policy = Policy::new(Scorer::Blend, 100)
        .selection(Selection::PerLayer)
        .allocator(Allocator::Threshold)
        .every(2)
        .slack(3)
        .prompt_tokens(4)
        .sinks(5)
        .recent(6)
        .offset_max(8)
        .skip_layers(9)
        .seed(10)
        .window(11)
        .pool_width(13)
        .observe_every(14)
        .decay(0.25)
        .prior_share(0.375)
        .redundancy(0.5)
        .similarity(0.625)
        .floor_share(0.75)
        .threshold(-1.5)
        .steepness(15)
        .value_reserve(16)
        .segments(17)
        .segment_quota(18)
        .sample(true)
        .pool_max(true)
        .exact_redundancy(true)
        .at_prompt_end(true);
    let shown = format!("{policy:?}");
    for field in [
        "flags: 240, ",
        "scorer: 16, selection: 4, budget: 100, every: 2, prompt_tokens: 4, sinks: 5, recent: 6, ",
        "offset_max: 8, skip_layers: 9, reserved0: 0, seed: 10, allocator: 4, slack: 3, ",
        "window: 11, pool_width: 13, observe_every: 14, decay: 0.25, prior_share: 0.375, ",
        "redundancy: 0.5, similarity: 0.625, floor_share: 0.75, threshold: -1.5, steepness: 15, ",
        "value_reserve: 16, segments: 17, segment_quota: 18, reserved1: 0 ",
    ] {
        assert!(shown.contains(field), "'{field}' is not in: {shown}");
    }
    let shown = format!("{:?}", config().max_observed_sequences(19).pressure_percent(20));
    assert!(shown.contains("max_observed_sequences: 19, pressure_percent: 20 "), "{shown}");
}

#[test]
fn scores_of_the_host_choose_who_stays() {
    let _session = Session::new();
    let pool = observing_pool(false);
    let policy = Policy::new(Scorer::Host, 24);
    let sequence = pool.create_sequence(&SequenceConfig::new().policy(policy)).unwrap();
    Text::new(SHAPE, 1, 100, 81).run(&pool, sequence, 0..100);
    assert_eq!(pool.sequence_info(sequence).unwrap().last_outcome, None);
    assert_eq!(scores(&pool, sequence, 0), []);
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!(report.outcome, CompressOutcome::NoObservations);
    let info = pool.sequence_info(sequence).unwrap();
    assert_eq!(info.last_outcome, Some(CompressOutcome::NoObservations));
    assert_eq!((info.last_failure, info.compactions), (Status::OK, 0));

    // [heads, positions], in two parts.
    let given = |head: u32, position: u32| ((position * 37 + head * 11) % 101) as f32;
    for range in [0..60, 60..100] {
        let part: Vec<f32> = (0..2)
            .flat_map(|head| range.clone().map(move |position| given(head, position)))
            .collect();
        let range = u64::from(range.start)..u64::from(range.end);
        assert_error(
            pool.set_scores(sequence, 0, range.clone(), &part[1..]),
            Status::INVALID,
            "are needed",
        );
        pool.set_scores(sequence, 0, range, &part).unwrap();
    }
    for head in 0..2 {
        let all: Vec<f32> = (0..100).map(|position| given(head, position)).collect();
        assert_eq!(scores(&pool, sequence, head), all);
    }
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!((report.outcome, report.lost_attention), (CompressOutcome::Done, 0.0));
    for head in 0..2 {
        let all: Vec<f64> = (0..100).map(|position| f64::from(given(head, position))).collect();
        let kept = largest(&all, 24);
        assert_eq!(positions(&pool, sequence, 0, head), kept);
        // Scores stay with their tokens.
        let left: Vec<f32> = kept.iter().map(|&position| given(head, position)).collect();
        assert_eq!(scores(&pool, sequence, head), left);
        let info = pool.retention_info(sequence, 0, head).unwrap();
        assert_eq!((info.rounds, info.tokens_removed, info.blocks_returned), (1, 76, 5));
    }
    assert_error(pool.set_scores(sequence, 0, 90..101, &[0.0; 22]), Status::INVALID, "100");
    assert_error(pool.set_scores(sequence, 0, 0..u64::MAX, &[0.0; 22]), Status::INVALID, "scores");
    assert_error(pool.set_scores(sequence, 1, 0..1, &[0.0; 2]), Status::INVALID, "layer 1");
    assert_error(pool.retention_info(sequence, 0, 2), Status::INVALID, "KV head 2");
    assert_error(pool.scores(sequence, 0, 2, &mut []), Status::INVALID, "KV head 2");
}

#[test]
fn observed_attention_is_what_the_definition_gives() {
    let _session = Session::new();
    let pool = observing_pool(false);
    let policy = Policy::new(Scorer::H2o, 40).observe_every(1);
    let sequence = pool.create_sequence(&SequenceConfig::new().policy(policy)).unwrap();
    let text = Text::new(SHAPE, 1, 100, 82);
    text.run(&pool, sequence, 0..99);
    text.run(&pool, sequence, 99..100);
    let expected = [0, 1].map(|head| given_attention(&text, head, 100));
    for head in 0..2 {
        let found = scores(&pool, sequence, head);
        assert_eq!(found.len(), 100);
        for (found, expected) in found.iter().zip(&expected[head as usize]) {
            let error = (f64::from(*found) - expected).abs();
            assert!(error < 5e-5 * (1.0 + expected), "{found}, not {expected}");
        }
    }
    let report = pool.compress(sequence, None).unwrap();
    let mut lost_of_heads = 0.0;
    for (head, expected) in expected.iter().enumerate() {
        let kept = largest(expected, 40);
        assert_eq!(positions(&pool, sequence, 0, head as u32), kept);
        let all: f64 = expected.iter().sum();
        let lost =
            1.0 - kept.iter().map(|&position| expected[position as usize]).sum::<f64>() / all;
        let info = pool.retention_info(sequence, 0, head as u32).unwrap();
        assert!((info.lost_attention - lost).abs() < 1e-5, "{info:?}, not {lost}");
        assert_eq!(info.lost_attention, info.lost_attention_sum);
        lost_of_heads += lost / 2.0;
    }
    assert!((report.lost_attention - lost_of_heads).abs() < 1e-5, "{report:?}");
    // Two may observe, and no third.
    let config = SequenceConfig::new().policy(Policy::new(Scorer::SnapKv, 40));
    pool.create_sequence(&config).unwrap();
    assert_error(pool.create_sequence(&config), Status::LIMIT, "max_observed_sequences");
}

#[test]
fn heads_with_lanes_of_their_own_share_a_budget() {
    let _session = Session::new();
    let pool = observing_pool(true);
    let policy = Policy::new(Scorer::Host, 32).allocator(Allocator::Adaptive).floor_share(0.25);
    let sequence = pool.create_sequence(&SequenceConfig::new().policy(policy.clone())).unwrap();
    Text::new(SHAPE, 1, 100, 83).run(&pool, sequence, 0..96);
    // All of head 1 is better than anything of head 0, which is sure of a quarter of 32.
    let given: Vec<f32> = (0..192).map(|i| i as f32).collect();
    pool.set_scores(sequence, 0, 0..96, &given).unwrap();
    let report = pool.compress(sequence, None).unwrap();
    assert_eq!((report.tokens_after, report.blocks_returned), (64, 12 - 1 - 4));
    assert_eq!(positions(&pool, sequence, 0, 0), (88..96).collect::<Vec<_>>());
    assert_eq!(positions(&pool, sequence, 0, 1), (40..96).collect::<Vec<_>>());
    let histories = [0, 1].map(|head| pool.retention_info(sequence, 0, head).unwrap());
    assert_eq!(histories.map(|history| history.rounds), [1, 1]);
    assert_eq!(histories.map(|history| history.tokens_removed), [88, 40]);
    assert_eq!(histories.map(|history| history.blocks_returned), [5, 2]);

    // Tables are those of a head.
    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    step.reserve().unwrap();
    for (head, retained) in [(0u32, 9i32), (1, 57)] {
        let (mut kv_len, mut slot_positions) = (vec![0; 1], vec![0; retained as usize]);
        let mut buffers = TableBuffers {
            kv_len: Some(&mut kv_len),
            slot_positions: Some(&mut slot_positions),
            ..Default::default()
        };
        let tables = step.export_head(0, head, &mut buffers).unwrap();
        assert_eq!(tables.kv_head(), head);
        assert_eq!(tables.block_bytes(), 16 * 2 * 32 * 4);
        assert_eq!(kv_len, [retained]);
        assert_eq!(slot_positions, (97 - retained..97).collect::<Vec<_>>());
    }
    let mut buffers = TableBuffers::default();
    assert_error(step.export_head(0, 2, &mut buffers), Status::INVALID, "kv_head");
    drop(step);
    let together = observing_pool(false);
    let config = SequenceConfig::new().policy(policy);
    assert_error(together.create_sequence(&config), Status::UNSUPPORTED, "LANE_PER_HEAD");
}

#[test]
fn what_a_policy_takes_is_known_beforehand() {
    let _session = Session::new();
    let pool = pool(2);
    let policy = Policy::new(Scorer::Streaming, 32).every(16);
    let block_bytes = 16 * 2 * 2 * 32 * 4;
    let taken = pool.policy_footprint(&policy, 0, 0).unwrap();
    // 15 tokens may come before a step, and one in it: three blocks of 16 in each layer.
    assert_eq!((taken.tokens_after_round, taken.tokens_steady), (32, 48));
    assert_eq!((taken.blocks_steady, taken.bytes_steady), (6, 6 * block_bytes));
    // A layer left whole holds all of 100 tokens.
    let taken = pool.policy_footprint(&policy.clone().skip_layers(1), 3, 100).unwrap();
    assert_eq!((taken.tokens_steady, taken.blocks_steady), (50, 7 + 4));
    let endless = policy.every(0);
    assert_error(pool.policy_footprint(&endless, 1, 0), Status::INVALID, "every");
}

#[test]
fn rounds_that_remove_nothing_say_why() {
    let _session = Session::new();
    let pool = observing_pool(false);
    let policy = Policy::new(Scorer::Host, 8).every(16);
    let sequence = pool.create_sequence(&SequenceConfig::new().policy(policy)).unwrap();
    let text = Text::new(SHAPE, 1, 40, 84);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 20, None).unwrap();
    step.reserve().unwrap();
    text.pass(&step, 0..20);
    let report = step.end().unwrap();
    assert_eq!((report.compactions, report.compactions_skipped), (0, 1));
    assert_eq!(report.last_skip_outcome, Some(CompressOutcome::NoObservations));
    assert_eq!((report.last_skip_status, report.pressure_rounds), (Status::OK, 0));
    assert_eq!(pool.sequence_info(sequence).unwrap().rounds_skipped, 1);
}

#[test]
fn policies_run_when_memory_runs_short() {
    let _session = Session::new();
    // 2 MiB of which a half may be pinned: 128 blocks of 8 KiB.
    let config = PoolConfig::new(2 << 20).threads(1).max_tokens_per_sequence(512);
    let pool: Pool = create(&config.pressure_percent(50), 1);
    let policy = Policy::new(Scorer::Streaming, 64);
    let text = Text::new(SHAPE, 1, 480, 85);
    let mut rounds = 0;
    for _ in 0..5 {
        let config = SequenceConfig::new().policy(policy.clone());
        let sequence = pool.create_sequence(&config).unwrap();
        let step = pool.begin_step().unwrap();
        step.append(sequence, 480, None).unwrap();
        step.reserve().unwrap();
        text.pass(&step, 0..480);
        let report = step.end().unwrap();
        assert_eq!(report.compactions, 0, "no round is due by itself");
        rounds += report.pressure_rounds;
        assert!(pool.counters().pool().unwrap().live_bytes <= 1 << 20);
    }
    // 150 blocks, less 26 a round.
    assert_eq!(rounds, 1);
}
