// The reading of a trace. A file is not trusted: every count is checked against its bounds and
// against the bytes that are left before anything is allocated by it.
using System;
using System.Buffers.Binary;
using System.IO;
using System.Text;
using Kvrt;

namespace Batching
{
    public sealed class TraceReader
    {
        private const string Magic = "KVTRACE1";
        private const int ChecksumBytes = 8;
        private const uint MostLayers = 64, MostHeads = 1024, MostRequests = 4096;
        private const uint MostTurns = 65536, MostRows = 8192;

        private readonly byte[] file;
        private readonly int end; // of the content: the checksum lies there
        private readonly Trace trace = new Trace();
        private int position = Magic.Length;
        private uint requests;

        private TraceReader(byte[] file)
        {
            this.file = file;
            end = file.Length - ChecksumBytes;
        }

        /// <exception cref="TraceException">It cannot be read, or is no trace.</exception>
        public static Trace ReadFile(string path)
        {
            byte[] file;
            try
            {
                file = File.ReadAllBytes(path);
            }
            catch (Exception error) when (error is IOException || error is ArgumentException ||
                                          error is UnauthorizedAccessException)
            {
                throw new TraceException($"cannot read '{path}': {error.Message}");
            }
            try
            {
                return Decode(file);
            }
            catch (TraceException error)
            {
                throw new TraceException($"'{path}': {error.Message}");
            }
        }

        /// <summary>Reads a whole file's bytes, which the trace keeps.</summary>
        public static Trace Decode(byte[] file)
        {
            if (!BitConverter.IsLittleEndian)
            {
                throw new TraceException("traces are read on little-endian machines only");
            }
            if (file.Length < Magic.Length + ChecksumBytes ||
                Encoding.ASCII.GetString(file, 0, Magic.Length) != Magic)
            {
                throw new TraceException("this is not a trace: it does not begin with " + Magic);
            }
            var reader = new TraceReader(file);
            reader.CheckChecksum();
            reader.ReadHeader();
            reader.ReadRequests();
            return reader.trace;
        }

        private void CheckChecksum()
        {
            Checksum computed = default;
            computed.Add(file.AsSpan(0, end));
            if (BinaryPrimitives.ReadUInt64LittleEndian(file.AsSpan(end)) != computed.Value)
            {
                throw new TraceException(
                    "the checksum does not match: the file is damaged or cut short");
            }
        }

        private void ReadHeader()
        {
            uint layers = Number("layers", 1, MostLayers);
            trace.QueryHeads = Number("query_heads", 1, MostHeads);
            trace.KvHeads = Number("kv_heads", 1, trace.QueryHeads);
            trace.HeadDim = Number("head_dim", 32, 256);
            trace.Format = (StorageFormat)Number("format");
            trace.RopeStyle = (RopeStyle)Number("rope_style");
            uint rotated = Number("rope_dimensions", 0, trace.HeadDim);
            CheckGeometry(rotated);
            var policy = new Policy
            {
                Scorer = (Scorer)Number("scorer"),
                Selection = (Selection)Number("selection"),
                Options = (PolicyOptions)Number("policy_flags"),
                Budget = Number("budget"),
                Every = Number("every"),
                Sinks = Number("sinks"),
                Recent = Number("recent"),
                OffsetMax = Number("offset_max")
            };
            trace.Policy = policy.Scorer == Scorer.None ? null : policy;
            requests = Number("requests", 1, MostRequests);
            policy.Seed = BinaryPrimitives.ReadUInt64LittleEndian(Take("seed", 8));
            trace.InverseFrequencies = new double[rotated / 2];
            Buffer.BlockCopy(file, Skip("inverse_frequencies", rotated / 2 * 8L),
                             trace.InverseFrequencies, 0, (int)(rotated / 2 * 8));
            trace.LayerNumbers = Numbers("layer_numbers", layers);
        }

        private void CheckGeometry(uint rotated)
        {
            if (trace.QueryHeads % trace.KvHeads != 0)
            {
                throw new TraceException($"query_heads is {trace.QueryHeads}, it must be a " +
                                         $"multiple of kv_heads, {trace.KvHeads}");
            }
            if (trace.HeadDim % 8 != 0)
            {
                throw new TraceException(
                    $"head_dim is {trace.HeadDim}, it must be a multiple of 8");
            }
            if (rotated % 2 != 0 || (rotated == 0) != (trace.RopeStyle == RopeStyle.None))
            {
                throw new TraceException($"rope_dimensions is {rotated}, it must be even, and 0 " +
                                         "exactly when nothing is rotated");
            }
        }

        private void ReadRequests()
        {
            for (uint i = 0; i < requests; ++i)
            {
                trace.Requests.Add(ReadRequest());
            }
            if (position != end)
            {
                throw new TraceException($"{end - position} bytes lie behind the last request");
            }
        }

        private TraceRequest ReadRequest()
        {
            var request = new TraceRequest { PromptTokens = Number("prompt_tokens") };
            uint turns = Number("turns", 1, MostTurns);
            request.Rounds = Number("rounds");
            request.Seen = Number("seen");
            request.Retained = Numbers("retained", (uint)trace.LayerNumbers.Length);
            for (uint i = 0; i < turns; ++i)
            {
                request.Turns.Add(ReadTurn());
            }
            return request;
        }

        private TraceTurn ReadTurn()
        {
            uint rows = Number("rows", 1, MostRows);
            uint accepted = Number("accepted", 0, rows);
            uint outputRows = Number("output_rows", 0, rows);
            Skip("token_ids", rows * 4L);
            var turn = new TraceTurn(file, position, rows, trace)
            {
                Accepted = accepted,
                OutputRows = outputRows
            };
            Skip("queries, keys, values and outputs", turn.LayerBytes * trace.LayerNumbers.Length);
            return turn;
        }

        private uint Number(string name, uint least = 0, uint most = uint.MaxValue)
        {
            uint value = BinaryPrimitives.ReadUInt32LittleEndian(Take(name, 4));
            if (value < least || value > most)
            {
                throw new TraceException($"{name} is {value}, it must be {least} to {most}");
            }
            return value;
        }

        private uint[] Numbers(string name, uint count)
        {
            int start = Skip(name, count * 4L);
            var values = new uint[count];
            Buffer.BlockCopy(file, start, values, 0, values.Length * 4);
            return values;
        }

        private ReadOnlySpan<byte> Take(string name, int bytes)
        {
            return file.AsSpan(Skip(name, bytes), bytes);
        }

        /// <summary>Passes so many bytes, and returns where they begin.</summary>
        private int Skip(string name, long bytes)
        {
            if (bytes > end - position)
            {
                throw new TraceException($"the file ends within {name}: {bytes} bytes are " +
                                         $"needed, {end - position} are left");
            }
            int start = position;
            position += (int)bytes;
            return start;
        }
    }
}
