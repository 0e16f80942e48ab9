// The decode loop allocates nothing that the collector would have to take back.
using System;

namespace Kvrt.Tests
{
    internal static class AllocationTests
    {
        [Test]
        public static void ADecodeLoopAllocatesNothing()
        {
            using (var engine = new Engine())
            {
                Sequence[] sequences = new Sequence[8];
                for (int i = 0; i < sequences.Length; ++i)
                {
                    sequences[i] = engine.Pool.CreateSequence();
                }
                var counts = new uint[sequences.Length];
                var rows = new float[sequences.Length * Engine.KvHeads * Engine.Dim];
                var queries = new float[sequences.Length * Engine.QueryHeads * Engine.Dim];
                var results = new float[queries.Length];
                var infos = new AppendInfo[sequences.Length];
                var statuses = new Status[sequences.Length];
                Fill(counts);
                for (int i = 0; i < 40; ++i) // everything is compiled, all step slots are known
                {
                    Decode(engine, sequences, counts, infos, statuses, rows, queries, results);
                }
                long before = GC.GetAllocatedBytesForCurrentThread();
                for (int i = 0; i < 100; ++i)
                {
                    Decode(engine, sequences, counts, infos, statuses, rows, queries, results);
                }
                Check.Equal(0L, GC.GetAllocatedBytesForCurrentThread() - before, "bytes");
                Check.Equal(140UL, engine.Pool.GetInfo(sequences[7]).Accepted, "accepted");
            }
        }

        private static void Fill(uint[] counts)
        {
            for (int i = 0; i < counts.Length; ++i)
            {
                counts[i] = 1;
            }
        }

        private static void Decode(
            Engine engine, Sequence[] sequences, uint[] counts, AppendInfo[] infos,
            Status[] statuses, float[] rows, float[] queries, float[] results)
        {
            var stored = new TensorLayout((uint)sequences.Length, Engine.KvHeads, Engine.Dim);
            var asked = new TensorLayout((uint)sequences.Length, Engine.QueryHeads, Engine.Dim);
            using (Step step = engine.Pool.BeginStep())
            {
                step.AppendBatch(sequences, counts, counts, infos);
                if (!step.TryReserve(out _, statuses))
                {
                    throw new CheckException("no room");
                }
                for (uint layer = 0; layer < engine.Layers; ++layer)
                {
                    step.Write(layer, ReadOnlyTensor.Float32(rows, stored),
                               ReadOnlyTensor.Float32(rows, stored));
                    step.Attend(layer, ReadOnlyTensor.Float32(queries, asked),
                                Tensor.Float32(results, asked));
                }
                step.AcceptBatch(sequences, counts);
                step.End();
            }
            DecodeOne(engine, sequences[0], counts);
        }

        /// <summary>The calls for single sequences, in a step that comes to nothing.</summary>
        private static void DecodeOne(Engine engine, Sequence sequence, uint[] tokenIds)
        {
            Step step = engine.Pool.BeginStep();
            step.Append(sequence, tokenIds.AsSpan(0, 1));
            step.Remove(sequence);
            step.Append(sequence, 1);
            step.Reserve();
            step.Accept(sequence, 0);
            step.Cancel();
            Span<uint> positions = stackalloc uint[4];
            engine.Pool.GetPositions(sequence, 0, 0, positions);
            engine.Pool.GetInfo(sequence);
            engine.Pool.GetLayerInfo(sequence, 0);
            engine.Pool.GetStats();
        }
    }
}
