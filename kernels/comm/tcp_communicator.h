// The communicator of ranks in several processes, once every two of them have a connection.
#ifndef HEADWATER_KERNELS_COMM_TCP_COMMUNICATOR_H_
#define HEADWATER_KERNELS_COMM_TCP_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "headwater/kernels/communicator.h"
#include "kernels/comm/tcp_socket.h"

namespace headwater::comm {

// peers[r] is connected with rank r; the own one, peers[rank], is empty.
std::unique_ptr<Communicator> MakeTcpCommunicator(int32_t rank, std::vector<Socket> peers);

}  // namespace headwater::comm

#endif  // HEADWATER_KERNELS_COMM_TCP_COMMUNICATOR_H_
