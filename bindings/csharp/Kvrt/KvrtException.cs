// Errors: one base class with the status, its category and the library's sentence, and a subclass
// per category.
using System;
using System.Text;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>A call into libkvrt failed. <see cref="Exception.Message"/> says which argument,
    /// what was wrong and what would be right.</summary>
    public class KvrtException : Exception
    {
        /// <summary>An error with the library's status and sentence.</summary>
        public KvrtException(
            Status status, Category category, string message, Exception inner = null)
            : base(message, inner)
        {
            Status = status;
            Category = category;
        }

        /// <summary>The code; one that this assembly does not know keeps its number.</summary>
        public Status Status { get; }

        /// <summary>What an unknown code counts as.</summary>
        public Category Category { get; }

        /// <summary>Throws the exception for the error that this thread's last call returned, with
        /// what a hook threw in that call behind it. Nothing may come between the two
        /// calls.</summary>
        internal static void Throw(int status, Exception hookError)
        {
            string message = LastMessage();
            throw Create((Status)status, Library.CategoryOf((Status)status), message, hookError);
        }

        internal static KvrtException Create(
            Status status, Category category, string message, Exception inner)
        {
            switch (category)
            {
                case Category.Argument:
                    return new KvrtArgumentException(status, message, inner);
                case Category.State:
                    return new KvrtStateException(status, message, inner);
                case Category.Capacity:
                    return new KvrtCapacityException(status, message, inner);
                case Category.Device:
                    return new KvrtDeviceException(status, message, inner);
                case Category.IO:
                    return new KvrtIOException(status, message, inner);
                case Category.Internal:
                    return new KvrtInternalException(status, message, inner);
                default:
                    return new KvrtException(status, category, message, inner);
            }
        }

        private static unsafe string LastMessage()
        {
            const int Usual = 512;
            byte* buffer = stackalloc byte[Usual];
            ulong length = (ulong)NativeMethods.kv_last_error(buffer, (UIntPtr)Usual);
            if (length < Usual)
            {
                return Encoding.UTF8.GetString(buffer, (int)length);
            }
            var longer = new byte[checked((int)length + 1)];
            fixed (byte* copy = longer)
            {
                NativeMethods.kv_last_error(copy, (UIntPtr)(uint)longer.Length);
            }
            return Encoding.UTF8.GetString(longer, 0, (int)length);
        }
    }

    /// <summary>An argument or the order of calls is wrong, or this build cannot: a defect of the
    /// caller. Nothing has changed.</summary>
    public sealed class KvrtArgumentException : KvrtException
    {
        internal KvrtArgumentException(Status status, string message, Exception inner = null)
            : base(status, Category.Argument, message, inner) { }
    }

    /// <summary>The sequence is gone, or cannot go back so far.</summary>
    public sealed class KvrtStateException : KvrtException
    {
        internal KvrtStateException(Status status, string message, Exception inner)
            : base(status, Category.State, message, inner) { }
    }

    /// <summary>No room: not now (<see cref="Status.Again"/>), never in this pool, or memory was
    /// refused.</summary>
    public sealed class KvrtCapacityException : KvrtException
    {
        internal KvrtCapacityException(Status status, string message, Exception inner)
            : base(status, Category.Capacity, message, inner) { }
    }

    /// <summary>The device or its driver failed.</summary>
    public sealed class KvrtDeviceException : KvrtException
    {
        internal KvrtDeviceException(Status status, string message, Exception inner)
            : base(status, Category.Device, message, inner) { }
    }

    /// <summary>A file could not be read or written, or does not match.</summary>
    public sealed class KvrtIOException : KvrtException
    {
        internal KvrtIOException(Status status, string message, Exception inner)
            : base(status, Category.IO, message, inner) { }
    }

    /// <summary>A defect of the library: please report it.</summary>
    public sealed class KvrtInternalException : KvrtException
    {
        internal KvrtInternalException(Status status, string message, Exception inner)
            : base(status, Category.Internal, message, inner) { }
    }
}
