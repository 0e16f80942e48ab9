//! Sequences: fork, truncate, pin, positions, lengths, stale handles.

use kvrt::{Category, Error, Policy, Scorer, Sequence, SequenceConfig, Status};

use crate::common::*;

#[test]
fn forks_share_blocks_until_they_write() {
    let _session = Session::new();
    let pool = pool(2);
    let parent = sequence(&pool);
    let text = Text::new(SHAPE, 2, 60, 11);
    text.run(&pool, parent, 0..40);
    let mut children = [Sequence::default(); 2];
    pool.fork_sequence(parent, &mut children).unwrap();
    assert!(children[0] != children[1] && !children.contains(&parent));
    let layer = pool.sequence_layer_info(children[0], 1).unwrap();
    assert_eq!((layer.retained, layer.blocks, layer.shared_blocks), (40, 3, 3));

    // The branches go on with different texts: each sees the 40 tokens and its own.
    let mut other = Text::new(SHAPE, 2, 60, 12);
    for l in 0..2 {
        other.keys[l][..40 * SHAPE.key_row()].copy_from_slice(text.keys(l, 0..40));
        other.values[l][..40 * SHAPE.value_row()].copy_from_slice(text.values(l, 0..40));
    }
    for (text, child) in [(&text, children[0]), (&other, children[1])] {
        for (layer, found) in text.run(&pool, child, 40..60).iter().enumerate() {
            text.assert_outputs(layer, 40..60, found, 2e-6, &Rule::default(), causal);
        }
    }
    let layer = pool.sequence_layer_info(children[0], 1).unwrap();
    assert_eq!((layer.retained, layer.blocks, layer.shared_blocks), (60, 4, 2));
    assert_eq!(pool.sequence_info(parent).unwrap().accepted, 40);
    pool.check().unwrap();

    pool.release_sequence(parent).unwrap();
    pool.release_sequence(children[1]).unwrap();
    let found = text.run(&pool, children[0], 59..60);
    assert_eq!(found.len(), 2, "a branch outlives its parent");
}

#[test]
fn truncated_tokens_are_forgotten() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 60, 13);
    let first = text.run(&pool, sequence, 0..40);
    pool.truncate_sequence(sequence, 17).unwrap();
    let info = pool.sequence_info(sequence).unwrap();
    assert_eq!((info.accepted, info.written, info.capacity), (17, 17, 17));
    assert_eq!(positions(&pool, sequence, 0, 1), (0..17).collect::<Vec<_>>());
    let again = text.run(&pool, sequence, 17..40);
    assert!(again[0] == first[0][17 * SHAPE.out_row()..], "the same tokens give the same bits");
    assert_error(pool.truncate_sequence(sequence, 41), Status::INVALID, "41");
}

#[test]
fn a_window_that_slid_has_no_snapshot() {
    let _session = Session::new();
    let model = kvrt::Model::new([SHAPE.layer().window(16)]);
    let pool = kvrt::Pool::create(&config(), &model).unwrap();
    let sequence = sequence(&pool);
    Text::new(SHAPE, 1, 120, 14).run(&pool, sequence, 0..120);
    let outcome = pool.truncate_sequence(sequence, 40);
    assert!(matches!(outcome, Err(Error::NoSnapshot(_))), "{outcome:?}");
    assert_eq!(outcome.unwrap_err().category(), Category::State);
}

#[test]
fn positions_fill_what_the_buffer_holds() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    Text::new(SHAPE, 1, 30, 15).run(&pool, sequence, 0..30);
    let mut some = [u32::MAX; 5];
    assert_eq!(pool.positions(sequence, 0, 0, &mut some).unwrap(), 30);
    assert_eq!(some, [0, 1, 2, 3, 4]);
    assert_error(pool.positions(sequence, 0, 2, &mut []), Status::INVALID, "kv_head 2");
    assert_error(pool.positions(sequence, 1, 0, &mut []), Status::INVALID, "layer 1");
}

#[test]
fn pinned_positions_stay() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    Text::new(SHAPE, 1, 60, 16).run(&pool, sequence, 0..60);
    pool.pin(sequence, 10..14).unwrap();
    let policy = Policy::new(Scorer::Streaming, 16).sinks(2);
    pool.compress(sequence, Some(&policy)).unwrap();
    // Two sinks and four pinned ones, and the ten most recent.
    let expected: Vec<u32> = [0, 1].into_iter().chain(10..14).chain(50..60).collect();
    assert_eq!(positions(&pool, sequence, 0, 0), expected);
    pool.unpin(sequence).unwrap();
    pool.compress(sequence, Some(&Policy::new(Scorer::Streaming, 8).sinks(2))).unwrap();
    let expected: Vec<u32> = [0, 1].into_iter().chain(54..60).collect();
    assert_eq!(positions(&pool, sequence, 0, 1), expected);
}

#[test]
fn pins_have_a_limit() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    for range in 0..16 {
        pool.pin(sequence, range..range + 1).unwrap();
    }
    assert_error(pool.pin(sequence, 16..17), Status::LIMIT, "16");
    pool.unpin(sequence).unwrap();
    pool.pin(sequence, 16..17).unwrap();
    assert_error(pool.pin(sequence, 5..5), Status::INVALID, "count is 0");
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 5..4;
    assert_error(pool.pin(sequence, backwards), Status::INVALID, "count is 0");
}

#[test]
fn info_follows_a_sequence_through_a_step() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = pool.create_sequence(&SequenceConfig::new().user_data(u64::MAX)).unwrap();
    let text = Text::new(SHAPE, 1, 30, 17);
    text.run(&pool, sequence, 0..20);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 10, None).unwrap();
    step.reserve().unwrap();
    let info = pool.sequence_info(sequence).unwrap();
    assert_eq!((info.capacity, info.written, info.accepted), (30, 20, 20));
    assert!(info.in_step && info.user_data == u64::MAX);
    text.pass(&step, 20..30);
    assert_eq!(pool.sequence_info(sequence).unwrap().written, 30);
    step.end().unwrap();
    let info = pool.sequence_info(sequence).unwrap();
    assert_eq!((info.accepted, info.published, info.blocks), (30, 30, 2));
    // 2 blocks of 16 tokens, each of K and V for 2 heads of 32 dimensions in f32.
    assert_eq!(info.bytes, 2 * 16 * 2 * 2 * 32 * 4);
    assert!(!info.in_step && info.compactions == 0);
}

#[test]
fn a_released_sequence_is_stale_everywhere() {
    let _session = Session::new();
    let pool = pool(1);
    let gone = sequence(&pool);
    pool.release_sequence(gone).unwrap();
    pool.release_sequence(gone).expect("releasing again is no error");
    let reused = sequence(&pool);
    assert_ne!(gone, reused, "a place that is used again gives another handle");

    assert_error(pool.sequence_info(gone), Status::STALE, "was released");
    assert_error(pool.sequence_layer_info(gone, 0), Status::STALE, "");
    assert_error(pool.positions(gone, 0, 0, &mut []), Status::STALE, "");
    assert_error(pool.fork_sequence(gone, &mut [Sequence::default()]), Status::STALE, "");
    assert_error(pool.truncate_sequence(gone, 0), Status::STALE, "");
    assert_error(pool.set_policy(gone, None), Status::STALE, "");
    assert_error(pool.pin(gone, 0..1), Status::STALE, "");
    assert_error(pool.unpin(gone), Status::STALE, "");
    assert_error(pool.compress(gone, None), Status::STALE, "");
    assert_error(pool.read_statistics(gone, &mut Default::default()), Status::STALE, "");
    assert_error(pool.save_statistics(gone, "unused"), Status::STALE, "");
    let step = pool.begin_step().unwrap();
    assert_error(step.append(gone, 1, None), Status::STALE, "");
    assert_error(step.append_batch(&[reused, gone], &[1, 1], None, None), Status::STALE, "item 1");
    assert_error(step.remove(gone), Status::STALE, "");
    assert_error(step.remove(reused), Status::INVALID, "not in this step");
    pool.release_sequence(reused).unwrap();
}

#[test]
fn what_is_no_handle_is_invalid() {
    let _session = Session::new();
    let pool = pool(1);
    for bits in [0, 1, u64::MAX, 1 << 32 | 9999] {
        let made_up = Sequence::from_bits(bits);
        assert_eq!(made_up.to_bits(), bits);
        let error = pool.sequence_info(made_up).unwrap_err();
        assert!(matches!(error, Error::Invalid(_) | Error::Stale(_)), "{bits:#x}: {error}");
    }
    assert_error(pool.release_sequence(Sequence::default()), Status::INVALID, "no handle");
    assert_eq!(format!("{:?}", Sequence::from_bits(255)), "Sequence(0xff)");
}
